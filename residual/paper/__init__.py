"""The algorithm of arXiv 2403.06924 as published."""
