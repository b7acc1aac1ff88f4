"""Formats of other libraries: read as sources, and exported."""
