"""
A product with a chosen error
=============================

``residual.matmul(A, B, tol=...)`` returns a product with a relative error of at most ``tol``
(with probability 99%), or raises. Here each rung is run on its own, and its bound is compared with the measured error.
"""

import torch

import residual
from magicube_cutlass.bench.figures import DENSE, OURS, label_points, panels

torch.manual_seed(0)
A, B = torch.randn(256, 300), torch.randn(300, 200)
exact = A.double() @ B.double()

points = []
for rung in ("direct", "full", "three_digit", "fp32"):
    C, report = residual.matmul(A, B, tol=0.5, rungs=(rung,), return_report=True)
    error = float((C - exact).norm() / exact.norm())
    points.append((error, report.upper, rung))
    print(f"{report.plan:18s} measured {error:.1e}, bound {report.upper:.1e}")

# %%
# A call climbs from the cheapest rung to the first whose bound is within the tolerance. If none is, it says why.

C, report = residual.matmul(
    A, B, tol=1e-5, rungs=("direct", "full", "three_digit"), return_report=True
)
print([attempt.plan for attempt in report.attempts])
try:
    residual.matmul(A, B, tol=1e-5, rungs=("direct",))
except residual.ToleranceError as error_found:
    print(error_found)

# %%
# The bound is above the error, and near it.

figure, (axes,) = panels(size=(6.4, 4.6))
axes.set(
    xscale="log",
    yscale="log",
    xlabel="measured error (ratio)",
    ylabel="bound (ratio)",
    title="each rung",
)
axes.plot([1e-8, 1e-1], [1e-8, 1e-1], color=DENSE, linewidth=1)
axes.plot([p[0] for p in points], [p[1] for p in points], "o", color=OURS)
label_points(axes, [(*point, OURS) for point in points])
