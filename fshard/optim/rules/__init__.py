"""Optimizers, one file each, and how they write parameters."""
