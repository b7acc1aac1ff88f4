"""The page of the lab, in a notebook and in a window: modules of JavaScript, and styles, as texts.

lab.js        states, undo, link, messages      controls.js  choices and numbers
layouts.js    leaves, axes that are dragged     explore/page.js  all that is drawn of an answer
widget.js     the lab in a notebook             window.js    the lab in a browser
"""

from __future__ import annotations

import json
from html import escape

from fshard.explore.page import bundled, resource

_PACKAGE = "fshard.laboratory"

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:">
<link rel="icon" href="data:,">
<title>fshard lab</title>
<style>{style}</style>
<body>
<div id="page" data-token="{token}"></div>
<script type="module">{script}</script>
</body>
</html>
"""


def widget_module() -> str:
    """Return the module of the widget, which has its styles in it."""
    return f"const STYLE = {json.dumps(_style())};\n{bundled(_PACKAGE, 'widget.js')}"


def html(token: str) -> str:
    """Return the page of a window, which sends its messages with a token."""
    page = _PAGE.replace("{token}", escape(token)).replace("{style}", _style())
    return page.replace("{script}", bundled(_PACKAGE, "window.js"))


def _style() -> str:
    return resource("fshard.explore", "page.css") + resource(_PACKAGE, "lab.css")
