"""The flow of float32 products on a GPU, apart until the passes of the core run there."""
