"""A reduced LeNet-5 on FashionMNIST: accuracy, rate and densities with quantized layers, as in the paper's Table 7.

One convolution and two fully connected layers are trained in float32; then the products of the layers run in int8 and
int4 at several thresholds (the convolution by im2col), and with an error the user chooses.  ``--project`` writes
``benchmarks/results/lenet.json``, ``docs/images/lenet.png`` and the table of ``docs/lab/residual.md``.
Source: Gu, arXiv 2403.06924, Table 7.
Run: ``python examples/lenet_fashion_mnist.py [--quick] [--out FOLDER] [--project]``
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from report import (
    RESULTS,
    ROOT,
    add_output_options,
    choose_output,
    data_folder,
    machine_line,
    markdown,
    replace_section,
    write_results,
)
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

from magicube_cutlass.bench.figures import DENSE, FOURTH, OURS, label_points, log_ticks, note, panels, save_figure
from magicube_cutlass.cli.environment import provenance
from residual.nn.conv import conv2d
from residual.nn.modules import ResidualLinear
from residual.paper.gemm import PaperReport, gemm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THRESHOLDS = (math.inf, 1.0, 0.1, 0.01, 0.0)
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4)
LABELLED = {
    "float32",
    "int8, origin",
    "int8, threshold 0",
    "int4, origin",
    "int4, threshold 1",
    "int4, threshold 0",
    "tol 0.01",
}
BATCH, EPOCHS = 128, 4
EVALUATED = 10_000  # images a batch of the evaluation, as printed; a scale is shared by a whole batch
CONV_IMAGES = 3000  # of the rows that quantize the convolution too
PAPER = {"rule": "mean", "scaling": "tensor", "rounding": "trunc", "vector_length": 1}
FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz",
         "t10k-labels-idx1-ubyte.gz")  # fmt: skip
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Data:
    """Images (n, 1, 28, 28) of mean 0 and deviation 1, labels (n,)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class LeNet(nn.Module):
    """Convolution 1 -> 6 of 5 x 5, maxima of 2 x 2, 1176 -> 120 -> 10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 5, padding=2)
        self.fc1, self.fc2 = nn.Linear(6 * 14 * 14, 120), nn.Linear(120, 10)

    def forward(self, x: Tensor) -> Tensor:
        return network(x, self.conv, self.fc1, self.fc2)


def network(x: Tensor, conv: Layer, fc1: Layer, fc2: Layer) -> Tensor:
    """Logits (n, 10)."""
    h = F.max_pool2d(F.relu(conv(x)), 2).flatten(1)  # (n, 1176)
    return fc2(F.relu(fc1(h)))


@dataclass
class Meter:
    """Seconds and densities of the layers of one way to compute them, a number for each batch."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    densities: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    products: dict[str, list[float]] = field(default_factory=dict)  # seconds of the integer products alone

    def timed(self, name: str, layer: Layer) -> Layer:
        """``layer``, its time kept."""

        def call(x: Tensor) -> Tensor:
            start = time.perf_counter()
            y = layer(x)
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)
            return y

        return call

    def product(self, name: str, x: Tensor, w: Tensor, options: dict[str, Any]) -> Tensor:
        """``x w`` in paper mode, its densities and the time of its products kept."""
        found = gemm(x, w, return_report=True, **options)
        assert isinstance(found, tuple) and isinstance(found[1], PaperReport)
        self.densities.setdefault(name, []).append((found[1].density_a, found[1].density_b))
        self.products.setdefault(name, []).append(found[1].times["product"] + found[1].times["correct"])
        return found[0]


def read_idx(path: Path) -> Tensor:
    """The array of bytes in a gzipped IDX file."""
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy())


def missing() -> str:
    """One line on what is not there and how to get it; empty where all is."""
    folder = data_folder("fashion-mnist")
    absent = [name for name in FILES if not (folder / name).is_file()]
    if not absent:
        return ""
    return (
        f"no {absent[0]} in {folder}: put the four IDX files of FashionMNIST there (zalandoresearch/fashion-mnist on "
        "GitHub, or Debian's package dataset-fashion-mnist), or set MAGICUBE_DATA to the folder above"
    )


def load(training: int) -> Data:
    """The first ``training`` images to train with, and all test images."""
    folder = data_folder("fashion-mnist")
    images, labels, tests, answers = (read_idx(folder / name) for name in FILES)
    mean, deviation = images.float().mean() / 255, images.float().std() / 255

    def ready(pixels: Tensor) -> Tensor:
        return ((pixels.float() / 255 - mean) / deviation).unsqueeze(1)  # (n, 1, 28, 28)

    return Data((ready(images[:training]), labels[:training].long()), (ready(tests), answers.long()))


def train(data: Data, epochs: int, progress: Progress) -> LeNet:
    """A network in float32."""
    torch.manual_seed(0)
    net, (images, labels) = LeNet(), data.train
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    task = progress.add_task("training", total=steps)
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for chosen in order[: len(images) // BATCH * BATCH].view(-1, BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.update(task, advance=1, description=f"training, loss {loss.item():.2f}")
    return net.eval()


def im2col(x: Tensor, conv: nn.Conv2d, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The convolution of ``x`` (n, 1, 28, 28) by one product of (784 n, 25) and (25, 6)."""
    n, size = x.shape[0], x.shape[2:]
    columns = F.unfold(x, 5, padding=2).transpose(1, 2).reshape(-1, 25)  # (784 n, 25)
    assert conv.bias is not None
    y = product(columns, conv.weight.flatten(1).T) + conv.bias  # (784 n, 6)
    return y.view(n, -1, 6).transpose(1, 2).reshape(n, 6, *size)


def paper_layers(net: LeNet, meter: Meter, with_conv: bool, options: dict[str, Any]) -> list[Layer]:
    """Layers whose products run in paper mode."""

    def linear(name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        return meter.product(name, x, layer.weight.T, options) + layer.bias

    conv: Layer = net.conv
    if with_conv:
        conv = partial(im2col, conv=net.conv, product=lambda x, w: meter.product("conv", x, w, options))
    return [conv, partial(linear, "fc1", net.fc1), partial(linear, "fc2", net.fc2)]


def chosen_layers(net: LeNet, with_conv: bool, tol: float) -> list[Layer]:
    """Layers whose products have a relative error of at most ``tol``."""
    conv: Layer = net.conv
    if with_conv:
        weight, bias = net.conv.weight, net.conv.bias
        conv = partial(conv2d, weight=weight, bias=bias, padding=2, tol=tol, on_failure="fallback")
    fc1, fc2 = (ResidualLinear.from_linear(layer, tol=tol, on_failure="fallback") for layer in (net.fc1, net.fc2))
    return [conv, fc1, fc2]


@torch.no_grad()
def evaluate(data: Data, images: int, layers: Iterable[Layer], meter: Meter) -> float:
    """Accuracy on the first ``images`` test images."""
    timed = [meter.timed(name, layer) for name, layer in zip(("conv", "fc1", "fc2"), layers, strict=True)]
    pixels, labels = (part[:images] for part in data.test)
    network(pixels[:8], *timed)  # a first call makes what is kept
    meter.seconds.clear()
    meter.densities.clear()
    meter.products.clear()
    found = [network(batch, *timed).argmax(1) for batch in pixels.split(EVALUATED)]
    return float((torch.cat(found) == labels).double().mean())


def row(way: str, accuracy: float, images: int, meter: Meter, with_conv: bool) -> dict[str, Any]:
    """One line of the table; milliseconds are of the fastest batch's quantized layers, for 1000 images."""
    names = ("conv", "fc1", "fc2") if with_conv else ("fc1", "fc2")
    densities = {
        name: [sum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1)]
        for name, pairs in meter.densities.items()
    }
    thousand = 1e3 * 1000 / min(EVALUATED, images)
    ms = sum(min(meter.seconds[name]) for name in names) * thousand
    products = sum(min(meter.products[name]) for name in names) * thousand if meter.products else None
    return {
        "way": way, "layers": "+".join(names), "images": images, "accuracy": accuracy,
        "ms": ms, "products ms": products, "densities": densities,
    }  # fmt: skip


def measure(net: LeNet, data: Data, images: dict[bool, int], progress: Progress) -> list[dict[str, Any]]:
    """All lines; ``images``: how many, without and with a quantized convolution."""
    found = []
    ways: list[tuple[str, Callable[[Meter, bool], Iterable[Layer]]]] = [
        ("float32", lambda meter, with_conv: [net.conv, net.fc1, net.fc2])
    ]
    for bits in (8, 4):
        for threshold in THRESHOLDS:
            options = {**PAPER, "bits": bits, "threshold": threshold}
            name = "origin" if threshold == math.inf else f"threshold {threshold:g}"
            ways.append((f"int{bits}, {name}", lambda m, c, o=options: paper_layers(net, m, c, o)))  # type: ignore[misc]
    ways += [(f"tol {tol:g}", lambda m, c, t=tol: chosen_layers(net, c, t)) for tol in TOLERANCES]  # type: ignore[misc]
    task = progress.add_task("evaluation", total=2 * len(ways))
    for with_conv, count in images.items():
        for way, make in ways:
            meter = Meter()
            progress.update(task, description=f"{way}, {'with' if with_conv else 'without'} the convolution")
            accuracy = evaluate(data, count, make(meter, with_conv), meter)
            found.append(row(way, accuracy, count, meter, with_conv))
            progress.update(task, advance=1)
    return found


def render(results: dict[str, Any]) -> str:
    """Table 7 as Markdown."""
    parts = [f"Measured on {machine_line(results)}."]
    for layers in dict.fromkeys(row["layers"] for row in results["rows"]):
        shown = [row for row in results["rows"] if row["layers"] == layers]
        names = layers.split("+")
        body = []
        for one in shown:
            pairs = [one["densities"].get(name) for name in names]
            cells = ["/".join(f"{x:.2f}" for x in pair) if pair else "" for pair in pairs]
            rate, products = f"{shown[0]['ms'] / one['ms']:.2f}", one["products ms"]
            times = f"{one['ms']:.1f}", "" if products is None else f"{products:.1f}"
            body.append([one["way"], f"{one['accuracy']:.2%}", *times, rate, *cells])
        headers = [
            "way",
            "accuracy",
            "ms",
            "products ms",
            "times float32's rate",
            *(f"densities of {name}" for name in names),
        ]
        title = f"### Table 7's rows: {layers} quantized, {shown[0]['images']} test images, ms for 1000 images"
        parts.append(f"{title}\n\n{markdown(headers, body)}")
    return "\n\n".join(parts)


def figure_of(results: dict[str, Any]) -> Figure:
    """Accuracy against time, a panel per set of quantized layers."""
    kinds = list(dict.fromkeys(row["layers"] for row in results["rows"]))
    figure, areas = panels(1, len(kinds), (6.2 * len(kinds), 5.0))
    figure.suptitle("Reduced LeNet-5 on FashionMNIST: accuracy against time of the quantized layers")
    note(figure, machine_line(results))
    labels = []
    for axes, layers in zip(areas, kinds, strict=True):
        names = []
        for row in (row for row in results["rows"] if row["layers"] == layers):
            kind = row["way"].split(",")[0]
            color = {"float32": "black", "int8": OURS, "int4": DENSE}.get(kind, FOURTH)
            point = (row["ms"], 100 * row["accuracy"])
            axes.plot(*point, "o", color=color)
            if row["way"] in LABELLED:
                names.append((*point, row["way"], color))
        axes.margins(0.15, 0.1)
        axes.set(xscale="log", xlabel="time of 1000 images (ms)", ylabel="accuracy (%)", title=layers)
        log_ticks(axes.xaxis)
        labels.append(names)
    for axes, names in zip(areas, labels, strict=True):
        label_points(axes, names)
    return figure


def draw(results: dict[str, Any], path: Path) -> str:
    """Draw the picture; return one line that says what became of it."""
    try:
        return save_figure(figure_of(results), path)
    except ImportError:
        return "no plot: pip install 'magicube-cutlass[plots]'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, one epoch")
    add_output_options(parser)
    args = parser.parse_args()
    choose_output(parser, args, args.quick)
    console = Console(stderr=True)
    path = (args.out or RESULTS) / "lenet.json"
    if not args.render:
        if line := missing():
            sys.exit(line)
        start = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            data = load(6000 if args.quick else 60_000)
            net = train(data, 1 if args.quick else EPOCHS, progress)
            torch.set_num_threads(1)  # times of small products on shared cores mean little with more
            images = {False: 1000, True: 100} if args.quick else {False: len(data.test[0]), True: CONV_IMAGES}
            found = measure(net, data, images, progress)
        write_results(path, {"machine": provenance(), "rows": found, "seconds": time.perf_counter() - start})
    results = json.loads(path.read_text())
    text = render(results)
    Console(width=150).print(Markdown(text))
    console.print(draw(results, (args.out or ROOT / "docs" / "images") / "lenet.png"), soft_wrap=True)
    if args.out is None:
        replace_section("lenet", text)


if __name__ == "__main__":
    main()
