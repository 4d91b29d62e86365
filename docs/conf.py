"""Sphinx configuration of the documentation: `make docs` builds and serves it, `make docs-build` only builds it."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "Deft"
release = version = installed_version("deft")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "deft_notebooks", "deft_reference"]
exclude_patterns = ["build", "pictures", "extensions"]

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # JSON with comments, and shell sessions with several prompts

html_theme = "furo"
html_title = "Deft"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_mock_imports = ["ray"]
