"""Split models into stages."""
