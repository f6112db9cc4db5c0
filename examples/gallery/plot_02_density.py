"""
Sparse or dense?
================

The time of an 8-bit sparse product by density, beside the fastest dense product of this machine. The crossing is the
break-even: below it, use the sparse product.
"""

from collections.abc import Callable
from functools import partial

import magicube_cutlass as mc
from magicube_cutlass.bench.figures import DENSE, OURS, label_ends, panels
from magicube_cutlass.bench.problems import dense_baselines, random_matrix, random_operand
from magicube_cutlass.bench.timing import measure

N = 512
densities, ours, dense = [0.02, 0.1, 0.2, 0.35, 0.5, 0.7], [], []
for density in densities:
    A = random_matrix(mc.random_pattern(N, N, 1 - density, 8, seed=0), 8, 0)
    B = random_operand(N, N, 8, 1)
    calls: dict[str, Callable[[], object]] = {
        "sparse": partial(mc.spmm, A, B),
        **dense_baselines(A, B),
    }
    times = {
        name: timing.best * 1e3 for name, timing in measure(calls, budget=0.06).items()
    }
    ours.append(times.pop("sparse"))
    best = min(times, key=times.__getitem__)
    dense.append(times[best])
    print(
        f"density {density:.2f}: sparse {ours[-1]:6.3f} ms, dense {dense[-1]:6.3f} ms ({best})"
    )

# %%
# ``mc.explain`` predicts both times without running them.

print(mc.explain(A, B))

# %%
figure, (axes,) = panels(size=(7.2, 4.2))
axes.plot(densities, ours, "o-", color=OURS)
axes.plot(densities, dense, "s--", color=DENSE)
axes.set(
    xlabel="density (share of stored elements)",
    ylabel="time (ms)",
    title=f"{N} x {N} x {N}, 8 bits, V = 8",
)
axes.set_ylim(0)
label_ends(
    axes,
    {
        "sparse": (densities[-1], ours[-1], OURS),
        "fastest dense": (densities[-1], dense[-1], DENSE),
    },
)
