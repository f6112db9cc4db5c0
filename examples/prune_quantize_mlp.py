"""A small network made sparse and quantized: FashionMNIST, weights in 8 x 1 vectors, nine of ten left out, int8.

A network of two hidden layers is trained in float32 and converted: pruned to a sparsity of 0.9, weights and activations
in 8 bits, the last layer left dense.  Fine-tuning on a pruning schedule, straight-through, wins the accuracy back; then
activations get static scales and the float weights are given up.  With ``--project`` it writes
``benchmarks/results/prune_quantize.json`` and the table of ``docs/how-to/prune-and-quantize.md``.
Run: ``python examples/prune_quantize_mlp.py [--quick] [--out FOLDER] [--project]``
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lenet_fashion_mnist import Data, load, missing
from report import (
    RESULTS,
    ROOT,
    add_output_options,
    choose_output,
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

import magicube_cutlass as mc
from magicube_cutlass.cli.environment import provenance
from magicube_cutlass.nn import ConversionReport, PruningSchedule, SparseQuantConfig

HIDDEN, BATCH, IMAGES = 512, 256, 1000
SPARSITY, START = 0.9, 0.5
CONFIG = {"head": None, "*": SparseQuantConfig(SPARSITY, vector_length=8, bits=8, act_bits=8)}


class Perceptron(nn.Module):
    """784 -> 512 -> 512 -> 10."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(784, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))  # (n, 10)


def flat(data: Data) -> Data:
    """Images as rows (n, 784)."""
    return Data((data.train[0].flatten(1), data.train[1]), (data.test[0].flatten(1), data.test[1]))


def train(
    net: nn.Module, data: Data, epochs: int, rate: float, progress: Progress, after: Callable[[], object] = lambda: None
) -> float:
    """Seconds of training; ``after`` is called after each step of the optimizer."""
    net.train()
    (images, labels), start = data.train, time.perf_counter()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=1e-4)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * rate, total_steps=steps)
    task = progress.add_task("training", total=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images))[: len(images) // BATCH * BATCH].view(-1, BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()
            after()
            progress.update(task, advance=1, description=f"training, loss {loss.item():.2f}")
    return time.perf_counter() - start


@torch.no_grad()
def accuracy(net: nn.Module, data: Data) -> float:
    """Share of the test images that the network names."""
    net.eval()
    images, labels = data.test
    found = torch.cat([net(batch).argmax(1) for batch in images.split(IMAGES)])
    return float((found == labels).double().mean())


@torch.no_grad()
def milliseconds(nets: list[nn.Module], images: Tensor, device: str, turns: int) -> list[float]:
    """Fastest time of a batch by each network, which take turns, on one thread or on the GPU."""
    nets, images = [copy.deepcopy(net).eval().to(device) for net in nets], images.to(device)
    fastest = [float("inf")] * len(nets)
    for turn in range(turns + 3):
        for i, net in enumerate(nets):
            start = time.perf_counter()
            net(images)
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                fastest[i] = min(fastest[i], 1e3 * (time.perf_counter() - start))
    return fastest


def hidden_bytes(net: Perceptron) -> int:
    """Bytes of the two hidden layers' tensors, as they would be stored."""
    layers = (net.fc1, net.fc2)
    return sum(
        each.compressed_bytes if isinstance(each, mc.nn.SparseQuantLinear) else sum(p.nbytes for p in each.parameters())
        for each in layers
    )


@dataclass
class Step:
    """A network as one step left it; ``seconds`` are what the step took."""

    name: str
    net: Perceptron
    accuracy: float
    seconds: float


def table(steps: list[Step], images: Tensor, turns: int) -> list[dict[str, Any]]:
    """The lines, with the times of each network."""
    nets: list[nn.Module] = [step.net for step in steps]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # times of small products on shared cores mean little with more
    cpu = milliseconds(nets, images, "cpu", turns)
    gpu = milliseconds(nets, images, "cuda", turns) if torch.cuda.is_available() else [None] * len(nets)
    torch.set_num_threads(threads)
    return [
        {"step": step.name, "accuracy": step.accuracy, "cpu ms": on_cpu, "gpu ms": on_gpu,
         "bytes": hidden_bytes(step.net), "seconds": step.seconds}
        for step, on_cpu, on_gpu in zip(steps, cpu, gpu, strict=True)
    ]  # fmt: skip


def masked(net: Perceptron) -> Perceptron:
    """The network with zeros where its hidden layers will be pruned."""
    pruned = copy.deepcopy(net)
    for layer in (pruned.fc1, pruned.fc2):
        layer.weight.data *= mc.prune(layer.weight.detach(), SPARSITY, 8)
    return pruned


def measure(
    data: Data, epochs: tuple[int, int], turns: int, progress: Progress
) -> tuple[list[dict[str, Any]], ConversionReport]:
    """The steps in order; ``epochs``: of training and of fine-tuning; ``turns``: how often each is timed."""
    torch.manual_seed(0)
    net, steps = Perceptron(), []

    def done(name: str, what: Perceptron, seconds: float) -> None:
        steps.append(Step(name, copy.deepcopy(what), accuracy(what, data), seconds))

    done("float32", net, train(net, data, epochs[0], 1e-3, progress))
    done("pruned, float32", masked(net), 0.0)
    start = time.perf_counter()
    report = mc.convert(net, CONFIG)
    done("pruned, int8", net, time.perf_counter() - start)
    count = epochs[1] * (len(data.train[0]) // BATCH)
    schedule = PruningSchedule(net, initial=START, final=SPARSITY, end=max(1, count // 2), every=max(1, count // 20))
    done("fine-tuned, int8", net, train(net, data, epochs[1], 1e-3, progress, schedule.step))
    start = time.perf_counter()
    mc.nn.calibrate(net, data.train[0][: 10 * IMAGES].split(IMAGES), progress=False)
    for layer in (net.fc1, net.fc2):
        assert isinstance(layer, mc.nn.SparseQuantLinear)
        layer.freeze()
    done("static scales, frozen", net, time.perf_counter() - start)
    return table(steps, data.test[0][:IMAGES], turns), report


def render(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    first, body = results["rows"][0], []
    for one in results["rows"]:
        gpu = "" if one["gpu ms"] is None else f"{one['gpu ms']:.3f}"
        rate = f"{first['cpu ms'] / one['cpu ms']:.1f}"
        size, seconds = f"{one['bytes'] / 1e3:,.0f}", f"{one['seconds']:.1f}"
        body.append([one["step"], f"{one['accuracy']:.2%}", f"{one['cpu ms']:.2f}", rate, gpu, size, seconds])
    headers = ["step", "accuracy", "CPU ms", "times float32's rate", "GPU ms", "kB of the hidden layers", "s to make"]
    epochs = "{} epochs of training and {} of fine-tuning".format(*results["epochs"])
    where = "on one thread of the CPU"
    if results["device"] == "cuda":
        where += f" ({results['machine']['cpu']}) and in eager calls on the GPU"
    head = f"ms for {IMAGES} test images, the fastest of {results['turns']} turns, {where}; {epochs}."
    return f"Measured on {machine_line(results)}; {head}\n\n{markdown(headers, body)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the data, few epochs")
    add_output_options(parser)
    args = parser.parse_args()
    choose_output(parser, args, args.quick)
    path = (args.out or RESULTS) / "prune_quantize.json"
    if not args.render:
        if line := missing():
            sys.exit(line)
        console, start = Console(stderr=True), time.perf_counter()
        epochs, turns = ((2, 1), 3) if args.quick else ((3, 3), 40)
        with Progress(console=console, transient=True) as progress:
            data = flat(load(4000 if args.quick else 30_000))
            rows, report = measure(data, epochs, turns, progress)
        console.print(report)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        seconds = time.perf_counter() - start
        facts = {"machine": provenance(), "device": device, "epochs": epochs, "turns": turns, "seconds": seconds}
        write_results(path, facts | {"rows": rows})
    text = render(json.loads(path.read_text()))
    Console(width=150).print(Markdown(text))
    if args.out is None:
        replace_section("prune_quantize", text, ROOT / "docs" / "how-to" / "prune-and-quantize.md")


if __name__ == "__main__":
    main()
