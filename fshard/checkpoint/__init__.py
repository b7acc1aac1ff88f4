"""Checkpoints: saved from any layout, restored into any other."""
