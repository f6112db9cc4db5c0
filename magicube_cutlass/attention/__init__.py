"""Quantized sparse attention: the sparse softmax, attention in three products, and the call that picks a form."""

from magicube_cutlass.attention.api import sparse_attention
from magicube_cutlass.attention.explain import explain_attention
from magicube_cutlass.attention.softmax import sparse_softmax

__all__ = ["explain_attention", "sparse_attention", "sparse_softmax"]
