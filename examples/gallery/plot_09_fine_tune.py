"""
Prune a model and fine-tune it
==============================

A small network learns a function, loses 75% of a layer to pruning and 24 of 32 bits to quantization, and learns again.
"""

import torch

import magicube_cutlass as mc
from magicube_cutlass.bench.figures import DENSE, OURS, panels

torch.manual_seed(0)
inputs = torch.randn(256, 64)
truth = torch.sin(inputs @ torch.randn(64, 8) / 4)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)
)


def train(steps: int, rate: float) -> list[float]:
    """Return the loss of each step."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=rate), []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(inputs), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


STEPS = 40
dense = train(STEPS, 1e-2)

# %%
# The first layer is pruned and quantized; the second, which is small, is left alone.

report = mc.convert(
    model, {"2": None, "*": mc.nn.SparseQuantConfig(sparsity=0.75, vector_length=8, bits=8)}
)
print(report)
tuned = train(STEPS, 1e-2)
print(f"loss: dense {dense[-1]:.4f}, pruned {tuned[0]:.4f}, fine-tuned {tuned[-1]:.4f}")

# %%
figure, (axes,) = panels(size=(7.2, 4.0))
axes.plot(range(STEPS), dense, color=DENSE, label="dense, float32")
axes.plot(range(STEPS, 2 * STEPS), tuned, color=OURS, label="25% of the first layer, int8")
axes.set(
    yscale="log",
    xlabel="step (count)",
    ylabel="loss (mean squared error)",
    title=f"pruned at step {STEPS}",
)
axes.legend()
