"""Files of patterns and matrices: safetensors with kind, version and scalar fields as JSON in the metadata.

Reading executes nothing, and rejects files of another kind or version, or with unknown fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

VERSION = "1"


def write(path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Write one object; the file appears whole or not at all."""
    name = os.fspath(path)
    metadata = {"kind": kind, "version": VERSION, **{key: json.dumps(value) for key, value in fields.items()}}
    # clones: safetensors refuses tensors that share memory, which two views of one buffer would
    plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    partial = f"{name}.{os.getpid()}.partial"
    try:
        save_file(plain, partial, metadata)
        os.replace(partial, name)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def _require(valid: bool, key: str, kind: str, value: object) -> None:
    if not valid:
        raise ValueError(f"field {key!r} must be {kind}, got {value!r}")


class Reader:
    """An open file of a known kind; a context manager that turns faults of the content into `ValueError`."""

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.name = os.fspath(path)
        self._kind = kind
        self._seen = {"kind", "version"}

    def __enter__(self) -> Self:
        with open(self.name, "rb"):  # the ordinary OSError for a path that cannot be read
            pass
        try:
            opened: Any = safe_open(self.name, framework="pt")
            self._file = opened.__enter__()
        except (SafetensorError, OSError, UnicodeError) as error:
            raise ValueError(f"{self.name}: not a whole safetensors file ({error})") from error
        self._names = set(self._file.keys())
        self._metadata: dict[str, str] = self._file.metadata() or {}
        kind, version = self._metadata.get("kind"), self._metadata.get("version")
        if kind != self._kind:
            raise ValueError(f"{self.name}: must hold a {self._kind}, got kind {kind!r}")
        if version != VERSION:
            raise ValueError(f"{self.name}: must have version {VERSION!r}, got {version!r}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
        if isinstance(error, (TypeError, ValueError, SafetensorError)) and not str(error).startswith(self.name):
            raise ValueError(f"{self.name}: {error}") from error

    def _field(self, key: str) -> Any:
        self._seen.add(key)
        if key not in self._metadata:
            raise ValueError(f"field {key!r} is missing")
        try:
            return json.loads(self._metadata[key])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"field {key!r} is not JSON: {self._metadata[key][:40]!r}") from error

    def integer(self, key: str) -> int:
        """Return an integer of the header."""
        value = self._field(key)
        _require(isinstance(value, int) and not isinstance(value, bool), key, "an integer", value)
        return int(value)

    def optional_integer(self, key: str) -> int | None:
        """Return an integer of the header, or None."""
        return None if self._field(key) is None else self.integer(key)

    def boolean(self, key: str) -> bool:
        """Return a boolean of the header."""
        value = self._field(key)
        _require(isinstance(value, bool), key, "true or false", value)
        return bool(value)

    def shape(self, key: str) -> tuple[int, int]:
        """Return two integers of the header."""
        value = self._field(key)
        two = isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value)
        _require(two, key, "two integers", value)
        return value[0], value[1]

    def expect_tensors(self, required: set[str], optional: frozenset[str] = frozenset()) -> None:
        """Raise unless exactly these tensors are stored, and no field besides those read so far."""
        if not required <= self._names <= required | optional:
            raise ValueError(f"must hold the tensors {sorted(required)}, got {sorted(self._names)}")
        unknown = set(self._metadata) - self._seen
        if unknown:
            raise ValueError(f"has unknown fields {sorted(unknown)}")

    def tensor(self, key: str) -> Tensor:
        """Return a tensor of the file."""
        # a clone: what safetensors returns is the file's memory, which others can rewrite or truncate
        tensor: Tensor = self._file.get_tensor(key).clone()
        return tensor

    def optional_tensor(self, key: str) -> Tensor | None:
        """Return a tensor of the file, or None."""
        return self.tensor(key) if key in self._names else None


def contents(path: str | os.PathLike[str]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return the kind of a safetensors file, "" if another program wrote it, and its tensors' shapes by name."""
    name = os.fspath(path)
    with open(name, "rb"):
        pass
    try:
        opened: Any = safe_open(name, framework="pt")
        with opened as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            return (file.metadata() or {}).get("kind", ""), shapes
    except (SafetensorError, OSError, UnicodeError) as error:
        raise ValueError(f"{name}: not a whole safetensors file ({error})") from error


def tensor(path: str | os.PathLike[str], key: str) -> Tensor:
    """Return one tensor of a safetensors file."""
    opened: Any = safe_open(os.fspath(path), framework="pt")
    with opened as file:
        found: Tensor = file.get_tensor(key).clone()
    return found
