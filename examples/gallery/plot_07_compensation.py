"""
Residual compensation, as in the paper
======================================

``residual.gemm`` is Algorithm 1 of Gu, arXiv 2403.06924: an 8-bit product, plus sparse products of what quantization
lost. The threshold decides how much is compensated; ``eta=1`` keeps the sparse products at every density.
"""

import torch

import residual
from magicube_cutlass.bench.figures import DENSE, OURS, panels

torch.manual_seed(0)
A, B = torch.randn(192, 192), torch.randn(192, 192)
exact = A.double() @ B.double()

thresholds, errors, densities = [0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2], [], []
for threshold in thresholds:
    D, report = residual.gemm(
        A, B, bits=8, threshold=threshold, rule="mean", eta=1.0, return_report=True
    )
    errors.append(float((D - exact).norm() / exact.norm()))
    densities.append((report.density_a + report.density_b) / 2)
    print(f"threshold {threshold:.1f}: density {densities[-1]:.2f}, error {errors[-1]:.1e}")

# %%
# ``tol=`` finds the largest threshold whose bound is within the tolerance.

D, report = residual.gemm(A, B, tol=5e-3, rule="mean", eta=1.0, return_report=True)
print(f"threshold {report.threshold:.3g}, bound {report.error:.1e}")

# %%
figure, (left, right) = panels(1, 2, (10.0, 3.8))
left.plot(thresholds, errors, "o-", color=OURS)
left.set(
    yscale="log", xlabel="threshold (ratio)", ylabel="relative error (ratio)", title="error"
)
right.plot(thresholds, densities, "s-", color=DENSE)
right.set(
    xlabel="threshold (ratio)",
    ylabel="kept entries (share)",
    title="cost: density of the sparse products",
)
