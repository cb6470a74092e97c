"""The configuration of Sphinx. `make docs` builds the site, and fails on a warning, such as a broken link."""

from importlib.metadata import version as version_of

project = "Tidegate"
author = "The Tidegate authors"
copyright = "The Tidegate authors"
version = release = version_of("tidegate")

# The source folder is the root of the repository, because pages link to files outside `docs/`.
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "bench/README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
]

extensions = ["myst_parser"]
myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Tidegate {version}"
html_copy_source = False
html_show_sphinx = False
nitpicky = True
