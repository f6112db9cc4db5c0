"""``magicube plan-parallel``: which parallel style each linear layer of a model should have on some GPUs."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from magicube_cutlass.cli.arguments import BITS, Json, check_choice, print_json
from magicube_cutlass.cli.console import output

_WIDTH = 140  # columns of the table at least


def plan_parallel(
    file: Annotated[Path, typer.Argument(metavar="MODEL.safetensors", help="State dict of a model, dense.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs: one host up to 8, hosts of 8 beyond.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Rows of the input.")] = 4096,
    sparsity: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of zeros after conversion.")] = 0.9,
    bits: Annotated[int, typer.Option(help="Bits of the weights: 4, 8, 12 or 16.")] = 8,
    reduce: Annotated[str, typer.Option(help="What sums travel as: exact, bfloat16 or int8.")] = "exact",
    skip: Annotated[
        list[str] | None, typer.Option(help="Layers to leave. Default: embeddings and output heads.")
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Calls are in CUDA graphs: the host's time is left out.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the style of each layer on some GPUs, the bytes that a GPU sends, and predicted times, by a model of links.

    Links: 300 GB/s inside a host (measured on two and four H200s) and 50 GB/s between hosts (of specifications). A
    layer whose tokens are cut takes no less than the host's time of an eager call, 0.75 ms, but with --graphs.
    """
    check_choice("bits", bits, BITS)
    check_choice("reduce", reduce, ("exact", "bfloat16", "int8"))
    if file.suffix != ".safetensors":
        raise ValueError(f"file must end in .safetensors, got {file.name!r}")
    if not file.exists():
        raise FileNotFoundError(f"No such file: {str(file)!r}")
    from safetensors import safe_open

    from magicube_cutlass.distributed.cost_model import LinearShape, cluster_of, plan_layers
    from magicube_cutlass.nn.convert_file import SKIPPED

    left = SKIPPED if skip is None else tuple(skip)
    shapes = []
    with safe_open(str(file), framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118  # a handle, no mapping
            size, layer = stored.get_slice(name).get_shape(), name.removesuffix(".weight")
            if name.endswith(".weight") and len(size) == 2 and not any(fnmatch(layer, each) for each in left):
                shapes.append(LinearShape(layer, size[0], size[1], 1 - sparsity, bits))
    if not shapes:
        raise ValueError(f"file must hold matrices NAME.weight, got none in {file.name!r}")
    cluster = cluster_of(gpus)
    found = plan_layers(shapes, tokens, cluster, reduce, graphs)
    total = sum(min(each.seconds, each.alone) if each.style == "one GPU" else each.seconds for each in found)
    alone = sum(each.alone for each in found)
    if as_json:
        rows = [{**each._asdict(), "layer": each.layer._asdict()} for each in found]
        print_json({"gpus": gpus, "tokens": tokens, "links": cluster.source, "layers": rows, "one GPU": alone})
        return
    from rich.table import Table

    title = f"{gpus} GPUs ({cluster.source}), {tokens} tokens, {sparsity:g} zeros, int{bits}, sums {reduce}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("layer", "out x in", "style", "MB a GPU sends", "us", "us on one GPU"):
        table.add_column(name, justify="left" if name in ("layer", "style") else "right", no_wrap=True)
    for each in found:
        size, us, cut = f"{each.layer.out} x {each.layer.inner}", f"{1e6 * each.seconds:.1f}", each.style != "one GPU"
        mb = f"{each.bytes / 1e6:.2f}" if cut else ""
        table.add_row(each.layer.name, size, each.style, mb, us if cut else f"({us})", f"{1e6 * each.alone:.1f}")
    console = output()
    console.width = max(console.width, _WIDTH)
    console.print(table)
    cuts = sum(each.style != "one GPU" for each in found)
    console.print(f"{cuts} of {len(found)} layers are cut: {1e6 * total:.0f} us, {1e6 * alone:.0f} us on one GPU")
    if cuts < len(found):
        console.print("in brackets: with the layer cut; one GPU is predicted to be faster")
