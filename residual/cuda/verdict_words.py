"""Where a GPU writes its verdict on a product: memory of the host, which the host reads without a copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.estimate.verdict import WORDS

_LOOKS = 4096  # at the memory, before the stream is asked whether a kernel failed: that takes as long as 60 looks


class Words:
    """Numbers of one verdict, the last of which is written after all others.

    Attributes
    ----------
    tensor : Tensor, shape (16,)
        float64, pinned; on the GPU for a captured graph, which runs any number of times.
    """

    def __init__(self, tensor: Tensor, is_pinned: bool) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._array = tensor.numpy() if is_pinned else None
        self._owner: weakref.ref[object] | None = None

    def arm(self, owner: object) -> None:
        """Mark the numbers as not written, for a verdict that `owner` will read."""
        if self._array is not None:
            self._array[-1] = 0.0
            self._owner = weakref.ref(owner)

    @property
    def is_free(self) -> bool:
        """Whether another verdict may be written: this one was read, or nobody will, and the GPU has written it."""
        owner = self._owner
        return owner is None or (owner() is None and self._array is not None and self._array[-1] == 1.0)

    def read(self, device: torch.device) -> list[float]:
        """Return the numbers as soon as they are written, once; later work on the stream is not waited for."""
        array = self._array
        if array is None:
            return self.tensor.tolist()
        wait_until(lambda: array[-1] == 1.0, device)
        numbers: list[float] = array.tolist()
        self._owner = None
        return numbers


def wait_until(is_written: Callable[[], bool], device: torch.device) -> None:
    """Look at memory that a GPU writes until it is written, without a call to the driver."""
    while not is_written():
        for _ in range(_LOOKS):
            if is_written():
                return
        if torch.cuda.current_stream(device).query() and not is_written():  # raises if a kernel failed
            torch.cuda.synchronize(device)  # started on another stream
            return


class WordsPool:
    """Verdicts of one thread; the first one that is free is taken, so that calls in a row write to one address."""

    def __init__(self) -> None:
        self._all: list[Words] = []

    def take(self) -> Words:
        """Return words for a new verdict."""
        for words in self._all:
            if words.is_free:
                return words
        made = Words(torch.zeros(WORDS, dtype=torch.float64, pin_memory=True, device="cpu"), True)
        self._all.append(made)
        return made
