"""
Attention over a mask
=====================

A mask of 8 x 1 vectors says which keys each query attends. Time and memory follow the vectors of the mask.
"""

import torch

import magicube_cutlass as mc
from magicube_cutlass.bench.figures import panels

L = 256
found = {
    "local": mc.masks.local(L, window=16),
    "strided": mc.masks.strided(L, stride=16),
    "bigbird": mc.masks.bigbird(L, window=8, tokens=8, random_keys=8),
}
for name, mask in found.items():
    print(f"{name}: density {mask.density:.3f}")

# %%
# The products run on 8-bit integers. The error is that of attention in float64 with the same mask.

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, L, 64)
for name, mask in found.items():
    o = mc.sparse_attention(q, k, v, mask)
    double = [x.double() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(
        double[0], double[1], double[2], mask.to_dense()
    )
    print(f"{name}: error {(o - exact).norm() / exact.norm():.4f}")

# %%
figure, areas = panels(1, 3, (11.0, 3.9))
for axes, (name, mask) in zip(areas, found.items(), strict=True):
    axes.imshow(mask.to_dense(), cmap="Blues", interpolation="nearest")
    axes.set(
        title=f"{name}, density {mask.density:.2f}",
        xlabel="key (index)",
        ylabel="query (index)",
    )
    axes.grid(False)
