"""``magicube convert``: the weights of a model's file, pruned and quantized."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from magicube_cutlass.cli.arguments import BITS, Json, VectorLength, check_choice, check_length, print_json
from magicube_cutlass.cli.console import output, working

_WIDTH = 160  # columns of the table at least


def convert(
    file: Annotated[Path, typer.Argument(metavar="MODEL.safetensors", help="State dict of a model.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Safetensors file to write. Default: only report.")
    ] = None,
    sparsity: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the vectors that are dropped.")] = 0.9,
    vector_length: VectorLength = None,
    bits: Annotated[int, typer.Option(help="Bits of the weights: 4, 8, 12 or 16.")] = 8,
    act_bits: Annotated[int, typer.Option(help="Bits of the activations: 4, 8, 12 or 16.")] = 8,
    only: Annotated[list[str] | None, typer.Option(help="Layers to convert, such as 'encoder.*'.")] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Layers to leave. Default: embeddings and output heads.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prune and quantize the linear layers of a model's file by magnitude, without fine-tuning."""
    check_choice("bits", bits, BITS)
    check_choice("act-bits", act_bits, BITS)
    check_length(vector_length)
    if file.suffix != ".safetensors":
        raise ValueError(f"file must end in .safetensors, got {file.name!r}")
    if not file.exists():
        raise FileNotFoundError(f"No such file: {str(file)!r}")
    from magicube_cutlass.nn.config import SparseQuantConfig
    from magicube_cutlass.nn.convert_file import SKIPPED, convert_file

    config = SparseQuantConfig(sparsity, vector_length or 8, bits, act_bits)
    with working(f"converting {file.name}"):
        report = convert_file(file, out, config, only=only or ("*",), skip=SKIPPED if skip is None else skip)
    if as_json:
        rows = [{**asdict(row), "shape": list(row.shape)} for row in report.rows]
        before, after = report.bytes_before, report.bytes_after
        print_json({"layers": rows, "bytes_before": before, "bytes_after": after, "out": out and str(out)})
        return
    console = output()
    console.width = max(console.width, _WIDTH)
    console.print(report)
    if out is not None:
        console.print(f"wrote {out}")
