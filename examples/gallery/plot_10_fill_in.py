"""
Why prune in vectors?
=====================

Single scattered nonzeros share no vectors: a matrix of density 0.1 is stored with density 0.57 if V = 8. Prune in
vectors, and nothing is filled in.
"""

import scipy.sparse
import torch

import magicube_cutlass as mc
from magicube_cutlass.bench.figures import DENSE, OURS, label_ends, panels

lengths = [1, 2, 4, 8]
stored: dict[str, list[float]] = {"scattered": [], "in vectors": []}
weight = torch.randn(512, 512)
scattered = scipy.sparse.random(512, 512, 0.1, random_state=0, format="csr")
for v in lengths:
    stored["scattered"].append(
        mc.SRBCRS.from_scipy(scattered, vector_length=v, bits=8).density
    )
    pruned = weight * mc.prune(weight, sparsity=0.9, vector_length=v)
    stored["in vectors"].append(
        mc.SRBCRS.from_dense(pruned, vector_length=v, bits=8).density
    )
    print(
        f"V = {v}: scattered {stored['scattered'][-1]:.3f}, in vectors {stored['in vectors'][-1]:.3f}"
    )

# %%
# The stored density is what a product costs.

figure, (axes,) = panels(size=(6.8, 4.0))
axes.plot(lengths, stored["scattered"], "s-", color=DENSE)
axes.plot(lengths, stored["in vectors"], "o-", color=OURS)
axes.set(
    xlabel="V (rows of a vector)",
    ylabel="stored density (share)",
    title="10% nonzeros",
    ylim=(0, 0.7),
)
axes.set_xticks(lengths)
ends = {
    "scattered": (8, stored["scattered"][-1], DENSE),
    "in vectors": (8, stored["in vectors"][-1], OURS),
}
label_ends(axes, ends)
