"""Options that several commands share, and the choice of one of a few words; torch is not imported here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

BITS = (4, 8, 12, 16)
LENGTHS = (1, 2, 4, 8, 16, 32)
STRIDES = (16, 32, 64)
DEVICES = ("cpu", "cuda", "auto")
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "compute_80")
ENDINGS = (".smtx", ".mtx", ".npz", ".npy", ".safetensors")  # also .gz behind the first two

_SHOWN = 12  # words that an error lists; of more it names the closest


def check_choice(name: str, value: object, known: Sequence[object], listed: str = "") -> None:
    """Raise `ValueError` unless `value` is one of `known`; `listed` is the command that lists many of them."""
    if value in known:
        return
    words = [str(each) for each in known]
    close = get_close_matches(str(value), words, 3, 0.4)
    hint = f"; did you mean {', '.join(close)}?" if close and isinstance(value, str) else ""
    if len(words) <= _SHOWN:
        raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}{hint}")
    see = f"; `{listed}` lists all {len(words)}" if listed else ""
    raise ValueError(f"unknown {name} {value!r}{hint}{see}")


def check_length(vector_length: int | None) -> None:
    """Raise `ValueError` unless the option is left out or a V."""
    if vector_length is not None:
        check_choice("vector_length", vector_length, LENGTHS)


def check_file(path: Path) -> None:
    """Raise `FileNotFoundError` or `ValueError` unless `path` is a file with an ending that is read."""
    if not path.exists():
        near = get_close_matches(path.name, [each.name for each in path.parent.glob("*")][:1000], 1, 0.8)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise FileNotFoundError(f"No such file: {str(path)!r}{hint}")
    name = path.name.removesuffix(".gz")
    if not name.endswith(ENDINGS):
        raise ValueError(f"file must end in {', '.join(ENDINGS)}, got {path.name!r}")


def chosen_device(device: str) -> str:
    """Return ``"cpu"`` or ``"cuda"`` for an option's value; `ValueError` for cuda without a GPU."""
    check_choice("device", device, DEVICES)
    if device == "cpu":
        return device
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError("device must be 'cpu' or 'auto', got 'cuda': torch finds no CUDA device")
    return "cuda" if has_gpu else "cpu"


def _completed(*words: object) -> Any:
    texts = [str(word) for word in words]
    return lambda incomplete: [text for text in texts if text.startswith(incomplete)]


def print_json(found: object) -> None:
    """Print a result as JSON."""
    typer.echo(json.dumps(found, indent=1))


MatrixFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help=f"A matrix: {', '.join(ENDINGS)}; .smtx and .mtx may be gzipped."),
]
VectorLength = Annotated[
    int | None,
    typer.Option(
        help="V. Rows of the matrix in each row of an .smtx file. Default: of the file, else 8.",
        autocompletion=_completed(*LENGTHS),
        show_default=False,
    ),
]
TensorName = Annotated[str | None, typer.Option("--tensor", help="Which tensor of a file of several.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")]
Device = Annotated[
    str,
    typer.Option(help="Where to run: cpu, cuda, or auto: cuda if there is one.", autocompletion=_completed(*DEVICES)),
]
LhsBits = Annotated[
    int, typer.Option(help="Bits of the sparse operand: 4, 8, 12 or 16.", autocompletion=_completed(*BITS))
]
RhsBits = Annotated[
    int, typer.Option(help="Bits of the dense operand: 4, 8, 12 or 16.", autocompletion=_completed(*BITS))
]
Stride = Annotated[
    int,
    typer.Option(help="Vectors that a row of SR-BCRS is padded to: 16, 32 or 64.", autocompletion=_completed(*STRIDES)),
]
Arch = Annotated[
    str,
    typer.Option(help="The GPUs to compile for, such as sm_80 or sm_90a.", autocompletion=_completed(*ARCHES)),
]
