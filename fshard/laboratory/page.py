"""The page of the lab: its module for a widget, and its document for a browser."""

from __future__ import annotations


def widget_module() -> str:
    """Return the page as a module of JavaScript, for a widget."""
    return "export default { render() {} };"


def html(token: str) -> str:
    """Return the page as a document, which sends its messages with a token."""
    return f"<!doctype html><title>fshard lab</title><p>{token}"
