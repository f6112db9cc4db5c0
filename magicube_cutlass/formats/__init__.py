"""Sparse formats: pattern, SR-BCRS, BCRS, their construction, files and generators."""
