"""Presets of layouts and transforms, and torch's familiar loop on top of them.  No algorithm lives here."""
