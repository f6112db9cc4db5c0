"""Sphinx builds the guides and, from the docstrings, the reference: ``make docs``."""

import re
from importlib import metadata
from typing import Any

project = "magicube_cutlass"
release = metadata.version("magicube-cutlass")
include_patterns = ["*.md", "docs/**"]  # the source folder is the repository's
root_doc = "docs/contents"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "description"
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "inherited-members": "Module, tuple, object, ValueError, Exception",
}
nitpicky = True  # a reference to nothing is an error
suppress_warnings = ["ref.python"]  # a word of a type, such as shape, names several attributes
nitpick_ignore_regex = [(r"py:(class|obj|data|exc)", r".*")]  # types of annotations, which lie in other projects
html_theme = "alabaster"
html_theme_options = {
    "description": "Quantized sparse products, and dense ones with a chosen error",
    "page_width": "70em",
}
napoleon_use_ivar = True  # fields of a named tuple are described once


def _plain_references(*arguments: Any) -> None:
    """References are numbered per docstring; reST wants their labels unique per page."""
    lines = arguments[-1]
    lines[:] = [re.sub(r"\[(\d+)\]_", r"[\1]", re.sub(r"^(\s*)\.\. \[(\d+)\] ", r"\1[\2] ", line)) for line in lines]


def setup(app: Any) -> None:
    """Connect before napoleon does."""
    app.connect("autodoc-process-docstring", _plain_references, priority=400)
