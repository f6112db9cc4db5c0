"""
Outliers
========

One column of the input grows. Integers with one scale lose everything else. Floats and small blocks confine the loss.
"""

import torch

import magicube_cutlass as mc
from magicube_cutlass.bench.figures import COLORS, MARKERS, label_ends, log_ticks, panels

torch.manual_seed(0)
x = torch.randn(64, 256)
factors = [1, 4, 20, 100]
ways = {
    "int8, per-tensor": lambda y: mc.quantize(y, bits=8).dequantize(),
    "int8, per-row": lambda y: mc.quantize(y, bits=8, scale="row").dequantize(),
    "e4m3, per-row": lambda y: mc.quantize(y, dtype="e4m3", scale="row").dequantize(),
    "mxfp8": lambda y: mc.quantize(y, dtype="mxfp8").dequantize(),
    "nvfp4": lambda y: mc.quantize(y, dtype="nvfp4").dequantize(),
}
errors: dict[str, list[float]] = {name: [] for name in ways}
for factor in factors:
    y = x.clone()
    y[:, 7] *= factor
    rest = torch.arange(256) != 7  # the error of the entries that are no outliers
    for name, way in ways.items():
        errors[name].append(float((way(y) - y)[:, rest].norm() / y[:, rest].norm()))

for name, found in errors.items():
    print(f"{name:17s} " + "  ".join(f"{error:.1e}" for error in found))

# %%
figure, (axes,) = panels(size=(7.4, 4.4))
axes.set(xscale="log", yscale="log", xlabel="size of the outlier column (times the others)")
axes.set(ylabel="error of the other entries (ratio)", title="one outlier column of 256")
for i, found in enumerate(errors.values()):
    axes.plot(factors, found, f"{MARKERS[i]}-", color=COLORS[i])
log_ticks(axes.xaxis)
label_ends(
    axes,
    {
        name: (factors[-1], found[-1], COLORS[i])
        for i, (name, found) in enumerate(errors.items())
    },
)
