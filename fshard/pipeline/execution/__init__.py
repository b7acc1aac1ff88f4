"""The interpreter that runs a schedule."""
