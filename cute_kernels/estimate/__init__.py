"""Error estimates by probes, and statistics of operands."""
