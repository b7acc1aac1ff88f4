"""Sums and random draws that are equal on every mesh."""
