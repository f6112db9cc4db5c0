"""
How many bits?
==============

The error of a product by the widths of its operands. ``L16-R8`` means: left operand 16 bits, right operand 8. Wider
integers are split into 8-bit digits, whose products are exact.
"""

import torch

import magicube_cutlass as mc
from magicube_cutlass.bench.figures import OURS, panels

torch.manual_seed(0)
weight, x = torch.randn(256, 512), torch.randn(512, 64)
weight = weight * mc.prune(weight, sparsity=0.8, vector_length=8)
exact = weight.double() @ x.double()

errors = {}
for left, right in mc.SPMM_PAIRS:
    A = mc.SRBCRS.from_dense(weight, vector_length=8, bits=left, scale="row")
    C = mc.spmm(A, mc.quantize(x, bits=right, scale="column"), out_dtype=torch.float32)
    errors[f"L{left}-R{right}"] = float((C - exact).norm() / exact.norm())
    print(f"L{left}-R{right}: error {errors[f'L{left}-R{right}']:.1e}, {A.nbytes:,} bytes")

# %%
# The narrower operand decides: L16-R4 is as wrong as its 4 bits.

figure, (axes,) = panels(size=(7.2, 3.8))
names = sorted(errors, key=errors.__getitem__)
axes.barh(names, [errors[name] for name in names], color=OURS)
axes.set(
    xscale="log",
    xlabel="relative error (Frobenius norm)",
    ylabel="widths (bits)",
    title="normal data",
)
