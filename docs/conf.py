"""Sphinx configuration of the documentation; `make docs` builds it offline."""

import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "_ext")]

# Sphinx reads documents below its source directory only. Outputs are the stored ones: nothing is executed here.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(ROOT / "notebooks", HERE / "notebooks", ignore=shutil.ignore_patterns(".*"))

project = "fshard"
author = "The fshard authors"
copyright = author
# The version is on each page. A release publishes its site beside those of before, in a folder of its own.
with (ROOT / "pyproject.toml").open("rb") as file:
    metadata = tomllib.load(file)["project"]
version = release = metadata["version"]

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "docstrings",
    "repository_links",
]
exclude_patterns = ["_ext", "notebooks/.ipynb_checkpoints"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # with tables
# A notebook in a console: the stored HTML of a picture is preferred, progress bars are text.
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]

nitpicky = True
default_role = "literal"  # docstrings write code in single backticks
add_module_names = False
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"fshard {release}"
html_static_path = ["_static"]
html_css_files = ["fshard.css"]
html_show_sourcelink = False
# The address of the repository is that of pyproject.toml: without one, pages have no link to it.
repository = metadata.get("urls", {}).get("Repository")
if repository:
    html_theme_options = {
        "source_repository": repository,
        "source_branch": f"v{release}",
        "source_directory": "docs/",
    }
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
