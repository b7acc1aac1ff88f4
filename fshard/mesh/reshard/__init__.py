"""From any layout to any other."""
