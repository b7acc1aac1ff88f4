"""Presets of layouts and transforms, and a torch-style loop on them. No algorithms."""
