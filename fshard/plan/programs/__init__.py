"""Programs that a search runs in place of longer ones."""
