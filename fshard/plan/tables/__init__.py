"""The plans of a search as text: layouts, tables, and why a layout is not the best."""
