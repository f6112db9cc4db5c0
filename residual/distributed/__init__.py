"""Dense products with a chosen error over several processes."""
