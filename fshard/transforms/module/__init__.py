"""Modules as pure functions of parameters and buffers."""
