"""Products of few rows with packed weights: one kernel, one table of weight formats."""
