"""Transforms of single-device functions into sharded ones."""
