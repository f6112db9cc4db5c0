"""The sparse products and what is reported of them."""
