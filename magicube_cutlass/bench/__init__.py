"""Timing of products for the command line."""
