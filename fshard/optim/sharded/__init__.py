"""Optimizers whose state and work are sharded over the devices of a mesh."""
