"""Checkpoints: saved from any layout, restored into any other."""

from fshard.checkpoint.restore import Differences, restore
from fshard.checkpoint.save import save

__all__ = ["Differences", "restore", "save"]
