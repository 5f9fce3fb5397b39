"""The documentation site: `make docs` writes it to build/docs."""

from nestling import __version__

project = "Nestling"
author = "The Nestling developers"
copyright = "The Nestling developers, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx_click", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = f"Nestling {version}"
html_static_path = ["images"]
html_copy_source = False
# Everything is served from the site itself: no fonts, scripts or badges from elsewhere.
html_theme_options = {"source_repository": "", "footer_icons": []}
