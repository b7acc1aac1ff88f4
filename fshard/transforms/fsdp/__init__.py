"""Units of parameters: all-gathered when used, their gradients reduce-scattered."""
