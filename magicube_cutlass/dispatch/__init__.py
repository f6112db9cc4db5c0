"""Execution paths of a product: kernel plans, cached calls, dense fallback, measured machine."""
