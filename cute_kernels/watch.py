"""Watching calls: a log, NVTX ranges and a trace, on request of environment variables that are read at import.

``MAGICUBE_LOG=1``: calls and compilations, through the logger ``magicube``; ``2``: what was selected too; ``3``: bytes
and the host's time too. ``MAGICUBE_NVTX=1``: an NVTX range per call. ``MAGICUBE_TRACE=folder``: one JSON file per
operator and shape, which ``magicube bench folder`` replays. Without them :func:`watched` returns the function as it
is, so that a call costs nothing more.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["LEVEL", "NVTX", "TRACE", "bytes_of", "described", "selected", "short", "watched"]

log = logging.getLogger("magicube")
_FORMAT = "%(asctime)s %(name)s %(message)s"
_F = TypeVar("_F", bound=Callable[..., Any])
_FIELDS = ("vector_length", "stride", "bits", "signed", "axis", "dtype", "block", "scale_dtype", "density")
_state = threading.local()
_traced: set[str] = set()


def _level(text: str) -> int:
    """The level that ``MAGICUBE_LOG`` names; 0 for anything else than 1, 2 and 3, with a warning."""
    if text in ("", "0", "1", "2", "3"):
        return int(text or 0)
    log.warning("MAGICUBE_LOG must be 1, 2 or 3, got %r", text)
    return 0


LEVEL = _level(os.environ.get("MAGICUBE_LOG", ""))
NVTX = os.environ.get("MAGICUBE_NVTX", "") not in ("", "0")
TRACE = os.environ.get("MAGICUBE_TRACE", "")
if LEVEL:
    log.setLevel(logging.INFO if LEVEL == 1 else logging.DEBUG)
    if not log.hasHandlers():
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter(_FORMAT))
        log.addHandler(_handler)


def described(x: object) -> dict[str, Any] | None:
    """Return what identifies an operand: its kind and sizes; None for other arguments.

    Examples
    --------
    >>> described(torch.zeros(2, 3))
    {'kind': 'Tensor', 'dtype': 'float32', 'shape': [2, 3], 'strides': [3, 1], 'device': 'cpu'}
    """
    device = getattr(getattr(x, "device", None), "type", None)
    if isinstance(x, Tensor):
        return {"kind": "Tensor", "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape),
                "strides": list(x.stride()), "device": device}  # fmt: skip
    if isinstance(x, (list, tuple)) and x and all(described(each) for each in x):
        return {"kind": "list", "items": [described(each) for each in x]}
    if type(x).__name__ == "TransposedMatrix":
        return {"kind": "TransposedMatrix", "of": described(x.T)}  # type: ignore[attr-defined]
    shape = getattr(x, "shape", None)
    if shape is None or device is None:
        return None
    found: dict[str, Any] = {"kind": type(x).__name__, "shape": list(shape), "device": device}
    for name in (
        "vector_length",
        "stride",
        "bits",
        "signed",
        "axis",
        "dtype",
        "block",
        "scale_dtype",
        "density",
        "tol",
    ):
        value = getattr(x, name, None)
        if value is not None:
            found[name] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    scale = getattr(x, "scale", None)
    found["scale"] = None if not isinstance(scale, Tensor) else list(scale.shape)
    return found


def bytes_of(x: object) -> int:
    """Return the bytes of an operand's tensors.

    Examples
    --------
    >>> bytes_of((torch.zeros(2, 3), [torch.zeros(2)], 5))
    32
    """
    if isinstance(x, Tensor):
        return x.nbytes
    if isinstance(x, (list, tuple)):
        return sum(map(bytes_of, x))
    size = getattr(x, "nbytes", None)
    if isinstance(size, int):
        return size
    return sum(bytes_of(getattr(x, name, None)) for name in ("data", "scale") if hasattr(x, name))


def short(found: dict[str, Any]) -> str:
    """Return a description of :func:`described` in a few words.

    Examples
    --------
    >>> short({"kind": "Tensor", "dtype": "float32", "shape": [2, 3]})
    'Tensor float32 2x3'
    """
    if found["kind"] == "list":
        return f"[{', '.join(map(short, found['items']))}]"
    if found["kind"] == "TransposedMatrix":
        return f"transpose of {short(found['of'])}"
    size = "x".join(map(str, found["shape"]))
    of = found.get("dtype") or (
        f"{'' if found.get('signed', True) else 'u'}int{found['bits']}" if "bits" in found else ""
    )
    vectors = f" V={found['vector_length']} density {found['density']:.3g}" if "vector_length" in found else ""
    return f"{found['kind']} {of} {size}{vectors}".replace("  ", " ")


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that JSON has, dtypes by name."""
    found = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in options.items()}
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str))}


def selected(operator: str, kernel: str, packed: object = ()) -> None:
    """Log what a call selected, at level 2; callers ask :data:`LEVEL` first."""
    size = f", packed operand of {bytes_of(packed)} bytes" if LEVEL > 2 and packed else ""
    log.debug("%s selected %s%s", operator, kernel, size)


def _trace(path: str, arguments: dict[str, Any]) -> None:
    """Write the call's file, unless there is one: shapes and options by parameter, no data."""
    operands = {name: described(value) for name, value in arguments.items()}
    content = {
        "operator": path,
        "operands": {name: value for name, value in operands.items() if value is not None},
        "options": _options(arguments),
    }
    text = json.dumps(content, sort_keys=True)
    if text in _traced:
        return
    _traced.add(text)
    folder = Path(TRACE)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{path.rpartition('.')[2]}-{hashlib.sha1(text.encode()).hexdigest()[:12]}.json"
    if not file.exists():
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        os.replace(partial, file)


def _run(path: str, arguments: dict[str, Any], call: Callable[[], Any], traces: bool) -> Any:
    depth: int = getattr(_state, "depth", 0)
    if TRACE and traces and depth == 0:
        _trace(path, arguments)
    name, has_ranges = path.rpartition(".")[2], NVTX and torch.cuda.is_available()
    if has_ranges:
        torch.cuda.nvtx.range_push(f"magicube.{name}")
    _state.depth = depth + 1
    start = time.perf_counter()
    try:
        result = call()
    finally:
        _state.depth = depth
        if has_ranges:
            torch.cuda.nvtx.range_pop()
    if LEVEL:
        seen = [described(value) for value in arguments.values()]
        text = f"{'  ' * depth}{name}({', '.join(short(each) for each in seen if each is not None)})"
        if LEVEL > 2:
            read, taken = bytes_of(list(arguments.values())), (time.perf_counter() - start) * 1e6
            text += f": {read} bytes of operands, {bytes_of(result)} of result, {taken:.0f} us of the host"
        log.info("%s", text)
    return result


def watched(path: str, traces: bool = True) -> Callable[[_F], _F]:
    """Decorate a public function, importable as `path`, so that its calls are watched if a variable asks for it.

    `traces`: ``magicube bench`` can call it with operands alike.

    Examples
    --------
    >>> def double(x):
    ...     return 2 * x
    >>> LEVEL or NVTX or bool(TRACE) or watched("package.double")(double) is double
    True
    """

    def decorate(function: _F) -> _F:
        if not (LEVEL or NVTX or TRACE):
            return function

        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **options)
            arguments = signature.bind(*args, **options).arguments
            return _run(path, arguments, lambda: function(*args, **options), traces)

        return run  # type: ignore[return-value]

    return decorate
