"""Hooks of other packages, each an optional extra: import the module of the package that is installed."""
