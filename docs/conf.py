"""The documentation site: `make docs` builds it into build/docs from the Markdown files of the repository."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "Kvasir"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
html_title = f"Kvasir {version}"

# The repository is the source, so that links to benchmarks and files work on the site as they do in a checkout.
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**",
    "benchmarks/README.md",
    "recipes/*/README.md",
]
exclude_patterns = ["docs/conf.py", "docs/images"]

extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "linkify"]
myst_linkify_fuzzy_links = False

html_theme = "furo"
html_show_sourcelink = False
