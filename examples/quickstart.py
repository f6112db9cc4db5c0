"""A pruned weight times an activation matrix, in 8-bit integers.  Run: ``python examples/quickstart.py``"""

import torch

import magicube_cutlass as mc

weight, x = torch.randn(256, 512), torch.randn(512, 128)
weight = weight * mc.prune(weight, sparsity=0.9, vector_length=8)  # keep a tenth of the 8 x 1 vectors
A = mc.SRBCRS.from_dense(weight, vector_length=8, bits=8)  # compressed and quantized
B = mc.quantize(x, bits=8, scale="column")  # one scale per column
C = mc.spmm(A, B, out_dtype=torch.float32)  # exact integer product, scales applied at the end

print(A)
print(f"relative error against float32: {float((C - weight @ x).norm() / (weight @ x).norm()):.4f}")
