"""Models cut into stages."""
