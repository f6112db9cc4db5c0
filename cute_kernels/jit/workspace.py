"""One allocation for the tensors of several launches, so that few addresses identify them for launch replay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from types import TracebackType
from typing import NamedTuple, overload

import torch
from torch import Tensor

from cute_kernels.jit.kernel import set_to_zero
from cute_kernels.jit.launch_cache import LaunchCache

_ALIGNMENT = 512  # that of torch's allocator
_open = threading.local()  # ``arena``: the open arena of this thread, if any


class Place(NamedTuple):
    """Offset, shape and dtype of a contiguous tensor in an arena."""

    offset: int  # bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor in `memory`, bytes."""
        return self.view(memory.view(self.dtype), self.strides)

    def view(self, memory: Tensor, strides: tuple[int, ...]) -> Tensor:
        """Return the tensor in `memory` of its dtype."""
        offset = memory.storage_offset() + self.offset // self.dtype.itemsize  # from the start of the storage
        return memory.as_strided(self.shape, strides, offset)

    @property
    def strides(self) -> tuple[int, ...]:
        """Memory strides of the contiguous tensor."""
        return tuple(accumulate(self.shape[:0:-1], mul, initial=1))[::-1] if self.shape else ()


class Arena:
    """Allocates the tensors that :func:`empty` and :func:`zeros` make in this thread while it is open.

    They are consecutive in `memory`. Without it, each has its own memory, and only the offsets are recorded.
    """

    def __init__(self, memory: Tensor | None = None) -> None:
        """`memory`: bytes, zero where :func:`zeros` allocates."""
        self.size = 0
        self.zeroed: list[slice] = []  # bytes that :func:`zeros` allocated
        self._memory, self._outer = memory, None
        self._taken: list[tuple[Tensor, Place]] = []

    def __enter__(self) -> Arena:
        self._outer = getattr(_open, "arena", None)
        _open.arena = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.arena = self._outer

    def take(self, make: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: object) -> Tensor:
        """Return the next tensor; `make` allocates it if there is no memory yet."""
        place = Place(self.size, torch.Size(shape), dtype)
        self.size += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
        if make is torch.zeros:
            self.zeroed.append(slice(place.offset, place.offset + place.nbytes))
        if self._memory is not None:
            return place.of(self._memory)
        found = make(shape, dtype=dtype, device=device)
        self._taken.append((found, place))
        return found

    def place_of(self, x: Tensor) -> Place:
        """Return the place of `x`, a whole tensor of this arena."""
        for taken, place in self._taken:
            if taken.data_ptr() == x.data_ptr() and taken.numel() == x.numel() and x.is_contiguous():
                return place._replace(shape=x.shape)
        raise ValueError(f"x must have been made in this arena, got a tensor {tuple(x.shape)} from elsewhere")


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``torch.empty``, or a tensor of the open arena of this thread."""
    arena: Arena | None = getattr(_open, "arena", None)
    if arena is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return arena.take(torch.empty, shape, dtype, device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, allocated as by :func:`empty`."""
    arena: Arena | None = getattr(_open, "arena", None)
    if arena is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return arena.take(torch.zeros, shape, dtype, device)


class Made(Sequence[Tensor]):
    """Tensors of one allocation, each made on access."""

    def __init__(self, memory: Tensor, places: list[tuple[Place, tuple[int, ...]]]) -> None:
        """`places`: with memory strides."""
        self._memory, self._places = memory, places
        self._as: dict[torch.dtype, Tensor] = {}  # views of the memory by dtype

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> Tensor: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, at: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(at, slice):
            return Made(self._memory, self._places[at])
        place, strides = self._places[at]
        memory = self._as.get(place.dtype)
        if memory is None:
            memory = self._as[place.dtype] = self._memory.view(place.dtype)
        return place.view(memory, strides)


class Kept:
    """Launch replay for functions that only launch kernels and allocate by :func:`empty` and :func:`zeros`.

    From the second call of a kind on, its tensors are one allocation. If all addresses equal those of an earlier call,
    the launches of that call are replayed.
    """

    def __init__(self, most: int, graph_after: int = 0, allocate: Callable[[int], Tensor] | None = None) -> None:
        """`most`: kinds, and sets of addresses, to cache; `graph_after`: see :class:`LaunchCache`.

        `allocate`: returns so many bytes for the tensors of a call, by default new ones.
        """
        self._most, self._allocate = most, allocate
        self._replays = LaunchCache(most, graph_after)
        self._known: dict[Hashable, tuple[int, list[slice], list[tuple[Place, tuple[int, ...]]]]] = {}

    def run(
        self,
        kind: Hashable,
        addresses: tuple[int, ...],
        device: torch.device,
        function: Callable[[], tuple[Tensor, ...]],
    ) -> Sequence[Tensor]:
        """Return the tensors of `function`, which are whole and were allocated by :func:`empty` or :func:`zeros`.

        Parameters
        ----------
        kind : Hashable
            Everything the launches depend on besides addresses.
        addresses : tuple of int
            Addresses that the kernels read and write, without those allocated here.
        device : torch.device
            Device of the tensors.
        function : callable
            Launches the kernels.
        """
        known = self._known.get(kind)
        if known is None:
            with Arena() as arena:
                found = function()
            if len(self._known) >= self._most:
                self._known.clear()
            places = [arena.place_of(each) for each in found]
            self._known[kind] = arena.size, arena.zeroed, [(place, place.strides) for place in places]
            return found
        size, zeroed, wanted = known
        allocate = self._allocate
        memory = torch.empty(size, dtype=torch.uint8, device=device) if allocate is None else allocate(size)
        for part in zeroed:
            if memory.is_cuda:
                set_to_zero(memory.data_ptr() + part.start, part.stop - part.start, memory.device.index)
            else:
                memory[part].zero_()

        def launch() -> None:
            with Arena(memory):
                function()

        self._replays.run((kind, addresses, memory.data_ptr()), launch)
        return Made(memory, wanted)
