"""Optimizers, one file each, and what writes their parameters."""
