"""Sphinx builds guides, gallery, notebooks and reference: ``make docs``, then open ``build/docs/index.html``."""

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # gallery_scraper
project = "magicube-cutlass"
author = "The magicube-cutlass developers"
project_copyright = author
release = metadata.version("magicube-cutlass")
root_doc = "index"
exclude_patterns = ["images/*", "gallery/*.ipynb", "gallery/*.py"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",  # made by the build, not committed
    "image_scrapers": ("gallery_scraper.figures",),
    "reset_modules": (),
    "within_subsection_order": "FileNameSortKey",
    "remove_config_comments": True,
    "write_computation_times": False,
    "copyfile_regex": "",
    "show_signature": False,
}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "off"  # notebooks are committed with their output, which a test compares
nb_merge_streams = True
toc_object_entries = False  # else the navigation of every page lists every function
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "description"
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "special-members": "__matmul__, __getitem__",  # A @ x, A[8:16]
    "inherited-members": "Module, tuple, object, ValueError, Exception",
}
nitpicky = True  # a reference to nothing is an error
suppress_warnings = ["ref.python"]  # a word of a type, such as shape, names several attributes
nitpick_ignore_regex = [(r"py:(class|obj|data|exc)", r".*")]  # types of annotations, which lie in other projects
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_theme = "furo"
html_title = "magicube-cutlass"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {"navigation_with_keys": True}
napoleon_use_ivar = True  # fields of a named tuple are described once


def _plain_references(*arguments: Any) -> None:
    """References are numbered per docstring; reST wants their labels unique per page."""
    lines = arguments[-1]
    lines[:] = [re.sub(r"\[(\d+)\]_", r"[\1]", re.sub(r"^(\s*)\.\. \[(\d+)\] ", r"\1[\2] ", line)) for line in lines]


def _write_explorer(app: Any) -> None:
    """The page of ``magicube explore``, with the default constants of a CPU."""
    from magicube_cutlass.cli.explore import page_text

    (Path(app.outdir) / "explore.html").write_text(page_text())


def setup(app: Any) -> None:
    """Connect before napoleon does."""
    app.connect("autodoc-process-docstring", _plain_references, priority=400)
    app.connect("builder-inited", _write_explorer)
