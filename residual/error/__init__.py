"""Error of a product: estimated by probes, measured, predicted."""
