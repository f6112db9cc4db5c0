"""Error estimates by probes, and statistics of operands, on a GPU."""
