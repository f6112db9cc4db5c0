"""What follows from an MMA atom: fragments, bank conflicts, column order."""
