"""Values printed in arXiv 2403.06924, and the library's beside them; ``benchmarks/paper_residual.py`` runs it."""
