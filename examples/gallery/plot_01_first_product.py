"""
Prune, compress, multiply
=========================

A weight is pruned in 8 x 1 vectors, stored as 8-bit integers, and multiplied by an input. The sums are exact; the
error is that of rounding to 8 bits.
"""

import torch

import magicube_cutlass as mc
from magicube_cutlass.bench.figures import panels

torch.manual_seed(0)
weight, x = torch.randn(64, 96), torch.randn(96, 32)
keep = mc.prune(weight, sparsity=0.8, vector_length=8)
A = mc.SRBCRS.from_dense(weight * keep, vector_length=8, bits=8)
print(A)

# %%
# The right operand has one scale per column. The scales are applied in the epilogue.

B = mc.quantize(x, bits=8, scale="column")
C = mc.spmm(A, B, out_dtype=torch.float32)
exact = (weight * keep) @ x
print(f"relative error: {(C - exact).norm() / exact.norm():.4f}")

# %%
# Left: the weight. Right: what is stored. A vector of 8 rows is kept or dropped as a whole.

figure, (left, right) = panels(1, 2, (9.0, 3.6))
for axes, values, title in (
    (left, weight, "weight"),
    (right, A.to_dense(), "stored: 20% of the vectors"),
):
    axes.imshow(values.abs(), cmap="Blues", aspect="auto")
    axes.set(title=title, xlabel="column (index)", ylabel="row (index)")
    axes.grid(False)
