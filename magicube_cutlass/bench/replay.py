"""Replay of the calls that ``MAGICUBE_TRACE=folder`` recorded: random operands of their kinds and sizes, timed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.integers import int_range
from magicube_cutlass.bench.timing import measure
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.generate import random_pattern
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.quantization.float_tensor import quantize_floats
from magicube_cutlass.quantization.quant_tensor import QuantTensor

__all__ = ["PACKAGES", "Replay", "random_operand_of", "replay"]

PACKAGES = ("magicube_cutlass.", "residual.", "cute_kernels.")


class Replay(NamedTuple):
    """A recorded call and its time; `us` is None if it was not run, and `note` says why."""

    operator: str
    operands: dict[str, Any]
    options: dict[str, Any]
    us: float | None
    best_us: float | None
    note: str = ""


def _random_ints(shape: list[int], bits: int, signed: bool) -> Tensor:
    low, high = int_range(bits, signed)
    return torch.randint(low, high + 1, shape, device="cpu")


def _tensor(found: dict[str, Any]) -> Tensor:
    dtype, shape, strides = getattr(torch, found["dtype"]), found["shape"], found["strides"]
    turned = len(shape) > 1 and strides[-1] != 1 and strides[-2] == 1
    sizes = [*shape[:-2], shape[-1], shape[-2]] if turned else shape
    if dtype == torch.bool:
        made = torch.rand(sizes, device="cpu") < 0.1
    elif dtype.is_floating_point:
        made = torch.randn(sizes, device="cpu").to(dtype)
    else:
        info = torch.iinfo(dtype)
        made = torch.randint(max(info.min, -(2**31)), min(info.max, 2**31 - 1), sizes, device="cpu").to(dtype)
    return made.mT if turned else made


def _sparse(found: dict[str, Any]) -> SRBCRS | BCRS:
    pattern, bits = _pattern(found), found.get("bits")
    scale = None if found["scale"] is None else torch.ones(found["scale"], device="cpu")
    size = [pattern.vectors, pattern.vector_length]
    if bits is None:
        vectors = torch.randn(size, device="cpu").to(getattr(torch, found["dtype"]))
    else:
        vectors = _random_ints(size, bits, found["signed"])
    options: dict[str, Any] = {"bits": bits, "signed": found["signed"], "scale": scale}
    if found["kind"] == "BCRS":
        return BCRS.from_pattern(pattern, vectors, **options)
    return SRBCRS.from_pattern(pattern, vectors, stride=found["stride"], **options)


def _pattern(found: dict[str, Any]) -> Pattern:
    m, k = found["shape"]
    return random_pattern(m, k, 1 - found["density"], found["vector_length"])


def random_operand_of(found: dict[str, Any]) -> Any:
    """Return a random operand of a recorded kind; `ValueError` for a kind that has none.

    Examples
    --------
    >>> random_operand_of({"kind": "Tensor", "dtype": "int8", "shape": [2, 3], "strides": [3, 1]}).shape
    torch.Size([2, 3])
    """
    kind = found["kind"]
    if kind == "list":
        return [random_operand_of(each) for each in found["items"]]
    if kind == "TransposedMatrix":
        return random_operand_of(found["of"]).T
    if kind == "Tensor":
        return _tensor(found)
    if kind == "Pattern":
        return _pattern(found)
    if kind in ("SRBCRS", "BCRS"):
        return _sparse(found)
    if kind == "QuantTensor":
        scale = None if found["scale"] is None else torch.ones(found["scale"], device="cpu")
        ints = _random_ints(found["shape"], found["bits"], found["signed"])
        return QuantTensor.from_ints(ints, bits=found["bits"], signed=found["signed"], scale=scale)
    if kind == "ScaledFloatTensor":
        block = found.get("block")
        block = tuple(block) if isinstance(block, list) else block
        of_scale = found["scale_dtype"] if block is not None else None
        return quantize_floats(
            torch.randn(found["shape"], device="cpu"), found["dtype"], found.get("axis"), block, of_scale
        )
    raise ValueError(f"operands of kind {kind} cannot be made anew")


def _function(path: str) -> Any:
    """The function of this dotted name."""
    top, *rest = path.split(".")
    found, name = import_module(top), top
    for part in rest:
        name = f"{name}.{part}"
        found = getattr(found, part) if hasattr(found, part) else import_module(name)
    return found


def _devices(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        if isinstance(found.get("device"), str):
            yield found["device"]
        for value in found.values():
            yield from _devices(value)
    elif isinstance(found, list):
        for value in found:
            yield from _devices(value)


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, list):
        return [_moved(each, device) for each in x]
    return x.T.to(device).T if type(x).__name__ == "TransposedMatrix" else x.to(device)


def replay(folder: str | os.PathLike[str], budget: float = 0.2) -> list[Replay]:
    """Time the calls of a trace, each on the device where it was recorded.

    Parameters
    ----------
    folder : str or path-like
        Folder that ``MAGICUBE_TRACE`` named. Operators are functions of this library; nothing else is called.
    budget : float, default 0.2
        Seconds per call.

    Raises
    ------
    ValueError
        If the folder has no trace, or a file that is none.
    """
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise ValueError(f"folder must have the JSON files of MAGICUBE_TRACE, got none in {os.fspath(folder)!r}")
    return [_replay_one(file, budget) for file in files]


def _replay_one(file: Path, budget: float) -> Replay:
    try:
        content = json.loads(file.read_text())
        operator, operands, options = (content[name] for name in ("operator", "operands", "options"))
        if not str(operator).startswith(PACKAGES):
            raise ValueError(f"operator must be a function of this library, got {operator!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: not a trace ({error})") from error
    device = next(iter(_devices(operands)), "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        return Replay(operator, operands, options, None, None, "recorded on a GPU, and torch finds none")
    torch.manual_seed(0)
    try:
        made = {name: _moved(random_operand_of(found), device) for name, found in operands.items()}
    except ValueError as error:
        return Replay(operator, operands, options, None, None, str(error))
    given = {name: getattr(torch, value.removeprefix("torch.")) if str(value).startswith("torch.") else value
             for name, value in options.items()}  # fmt: skip
    function = _function(operator)
    wait = torch.cuda.synchronize if device == "cuda" else None
    try:
        found = measure({"call": lambda: function(**made, **given)}, budget=budget, synchronize=wait)["call"]
    except (ValueError, TypeError, ArithmeticError, NotImplementedError) as error:
        return Replay(operator, operands, options, None, None, str(error))
    return Replay(operator, operands, options, found.median * 1e6, found.best * 1e6)
