"""Quantized tokens of all ranks where a product reads them: each rank writes its own, the others' are gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cute_kernels.jit.workspace import Kept
from magicube_cutlass.distributed.collectives import start_gather_in_place
from magicube_cutlass.distributed.peers import peers_of

_REPLAYS = 32  # sets of addresses
_SEGMENT = 512  # bytes


class CutTokens:
    """Memory for the quantized tokens of all ranks, which every rank fills for its own, and how the others' arrive.

    Parameters
    ----------
    shape : torch.Size
        Of a rank's integers.
    tokens : int
        Of a rank.
    device : torch.device
        A GPU.
    scaled : bool
        Each token has a scale.
    mesh : DeviceMesh
        One dimension.
    """

    def __init__(self, shape: torch.Size, tokens: int, device: torch.device, scaled: bool, mesh: DeviceMesh) -> None:
        self._shape, self._tokens, self._device, self._scaled, self._mesh = shape, tokens, device, scaled, mesh
        self.launches = Kept(_REPLAYS)
        self.by_copies = False  # which leave the SMs to a product that runs beside them
        self._start: Callable[[], Callable[[], object]] | None = None
        peers = peers_of(mesh)
        size = mesh.size() * shape.numel()
        scales = mesh.size() * tokens * 4 if scaled else 0
        begin = -(-size // _SEGMENT) * _SEGMENT
        found = None if peers is None else peers.memory("tokens", begin + scales)
        if found is not None and peers is not None:
            memory, handle = found
            parts = [[each[:size].view(mesh.size(), *shape)] for each in memory]
            if scaled:  # first, since they are few
                for part, each in zip(parts, memory, strict=True):
                    part.insert(0, each[begin : begin + scales].view(torch.float32).view(mesh.size(), tokens, 1))
            own = parts[mesh.get_local_rank()]
            self._data, self._scale = own[-1], own[0] if scaled else None
            self._start, self.by_copies = partial(peers.gather, parts, handle), True

    def memory(self) -> tuple[Tensor, Tensor | None, Callable[[], Callable[[], object]]]:
        """Return memory for integers (ranks, ...) and scales (ranks, tokens, 1), and what starts the gather."""
        if self._start is not None:
            return self._data, self._scale, self._start
        ranks = self._mesh.size()
        data, scale = torch.empty(ranks, *self._shape, dtype=torch.int8, device=self._device), None
        if self._scaled:
            scale = torch.empty(ranks, self._tokens, 1, device=self._device)
        parts = [data] if scale is None else [data, scale]
        return data, scale, partial(start_gather_in_place, parts, self._mesh)
