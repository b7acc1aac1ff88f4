"""Pairs of functions on one device's tensors, run on every device."""
