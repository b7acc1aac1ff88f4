"""Schedules as data: built, verified, simulated and drawn."""
