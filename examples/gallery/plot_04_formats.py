"""
What numbers does a format have?
================================

Low-precision floats spend their codes near zero, integers spread them evenly. A format is good if its values lie where
your data lie.
"""

import torch

from cute_kernels.floats import FORMATS, decode
from magicube_cutlass.bench.figures import COLORS, panels

rows = {"int4": torch.arange(-7, 8) / 7.0, "int8": torch.arange(-127, 128) / 127.0}
for name in ("e2m1", "e2m3", "e3m2", "e4m3"):
    bits = 1 + FORMATS[name].exponent + FORMATS[name].mantissa
    values = decode(torch.arange(2**bits, dtype=torch.uint8), name)
    values = values[values.isfinite()]
    rows[name] = values / values.max()
    print(f"{name}: {bits} bits, {len(values.unique())} values, largest {values.max():g}")

# %%
# Each tick is one value, relative to the largest one. Between the ticks, numbers are rounded.

figure, (axes,) = panels(size=(8.6, 4.2))
for i, values in enumerate(rows.values()):
    inside = values[(values >= 0) & (values <= 1)]
    axes.plot(inside, torch.full_like(inside, i), "|", color=COLORS[i], markersize=18)
axes.set_yticks(range(len(rows)), list(rows))
axes.set(
    xlabel="value over the largest value (ratio)",
    ylabel="format (name)",
    title="positive values",
)
axes.set_ylim(-0.6, len(rows) - 0.4)
