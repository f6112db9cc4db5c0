"""Plans and their costs: names and sizes, no tensors."""
