"""Conversion of a state dict in a safetensors file: weights become frozen sparse layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from magicube_cutlass.formats import storage
from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.nn.linear import SparseQuantLinear
from magicube_cutlass.nn.report import ConversionReport, ConversionRow

__all__ = ["SKIPPED", "convert_file"]

# Matrices that are no linear layers, by the names of common models.
SKIPPED = ("*embed*", "*wte*", "*wpe*", "*lm_head*")


def _layer(weight: torch.Tensor, bias: torch.Tensor | None, config: SparseQuantConfig) -> SparseQuantLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return SparseQuantLinear.from_linear(linear, **asdict(config)).eval().freeze()


def _reason(name: str, shape: tuple[int, ...], floating: bool, only: Sequence[str], skip: Sequence[str]) -> str:
    """Why a weight stays; "" if it becomes a sparse layer."""
    if len(shape) != 2 or not floating:
        return "no float matrix"
    if not any(fnmatchcase(name, each) for each in only):
        return "no pattern fits"
    fits = next((each for each in skip if fnmatchcase(name, each)), None)
    return "" if fits is None else f"left, as {fits!r} says"


def convert_file(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    config: SparseQuantConfig | None = None,
    *,
    only: Sequence[str] = ("*",),
    skip: Sequence[str] = SKIPPED,
) -> ConversionReport:
    """Prune and quantize the matrices ``NAME.weight`` of a safetensors file, one at a time.

    The written file is the state dict of the model after ``magicube_cutlass.convert(model, ..., freeze=True)`` of the
    same layers: convert the model likewise, then ``load_state_dict``.

    Parameters
    ----------
    path : str or path-like
        State dict of a model.
    out : str or path-like, optional
        File to write. Default: only report.
    config : SparseQuantConfig, optional
        Options of all layers.
    only, skip : sequence of str
        Patterns of NAME as in ``fnmatch``; `skip` goes first, by default embeddings and output heads.

    Returns
    -------
    ConversionReport

    Raises
    ------
    ValueError
        If the file is malformed, or no matrix is left to convert.

    Examples
    --------
    >>> import tempfile, torch, safetensors.torch
    >>> state = torch.nn.Sequential(torch.nn.Linear(64, 64)).state_dict()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     safetensors.torch.save_file(state, f"{folder}/m.safetensors")
    ...     convert_file(f"{folder}/m.safetensors").converted
    ('0',)
    """
    config, name = config or SparseQuantConfig(), os.fspath(path)
    kind, shapes = storage.contents(name)
    if kind in ("Pattern", "SRBCRS", "BCRS"):
        raise ValueError(f"{name}: must hold the state of a model, got a {kind}")
    rows: list[ConversionRow] = []
    tensors: dict[str, torch.Tensor] = {}
    total = 0
    with safe_open(name, framework="pt") as file:
        for key in sorted(shapes):
            tensor = file.get_tensor(key)
            total += tensor.nbytes
            prefix = key.removesuffix(".weight")
            bias_key, of_layer = f"{prefix}.bias", key.endswith(".weight")
            note = _reason(prefix, shapes[key], tensor.is_floating_point(), only, skip) if of_layer else "other"
            if note:
                if of_layer and len(shapes[key]) == 2:
                    size = (int(shapes[key][0]), int(shapes[key][1]))
                    rows.append(ConversionRow(prefix, size, None, tensor.nbytes, tensor.nbytes, note))
                tensors.setdefault(key, tensor)
                continue
            bias = file.get_tensor(bias_key) if len(shapes.get(bias_key, ())) == 1 else None
            layer = _layer(tensor, bias, config)
            before = tensor.nbytes + (0 if bias is None else bias.nbytes)
            rows.append(ConversionRow(prefix, tuple(tensor.shape), layer.config, before, layer.compressed_bytes))
            tensors.update({f"{prefix}.{each}": value for each, value in layer.state_dict().items()})
    report = ConversionReport(tuple(rows), total)
    if not report.converted:
        raise ValueError(f"{name}: must hold a matrix to convert, got none that --only and --skip leave")
    if out is not None:
        save_file({key: value.contiguous() for key, value in tensors.items()}, os.fspath(out), {"format": "pt"})
    return report
