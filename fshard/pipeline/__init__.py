"""Pipelines: schedules as data, which are drawn, simulated and proven before anything runs."""
