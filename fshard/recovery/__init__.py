"""Survivors of a lost process go on: who is left, what they keep, and the loop around it."""
