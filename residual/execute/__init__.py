"""A planned product: run, checked, repeated."""
