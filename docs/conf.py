"""Sphinx builds the guides and, from the docstrings, the reference: ``make docs``."""

from importlib import metadata

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
nitpick_ignore_regex = [(r"py:(class|obj|data|exc)", r".*")]  # types of annotations, which lie in other projects
html_theme = "alabaster"
html_theme_options = {
    "description": "Quantized sparse products, and dense ones with a chosen error",
    "page_width": "70em",
}
