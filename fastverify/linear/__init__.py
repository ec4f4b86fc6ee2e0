"""Products of a few rows with what stands before and after them, for models whose launches cost more than their weights."""
