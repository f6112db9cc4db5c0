"""An embedding whose rows are integers with scales: a lookup dequantizes the rows that it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.integers import unpack4
from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.dense.state import weight_shapes
from magicube_cutlass.quantization.group_tensor import GroupTensor, quantize_groups


class QuantEmbedding(nn.Module):
    """Embedding with an int8 or int4 weight, for inference: ``y = s q[ids] + m``.

    Parameters
    ----------
    weight : GroupTensor, shape (rows, features)
        Quantized weight.
    dtype : torch.dtype, default torch.float32
        Of the output.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> table = mc.nn.QuantEmbedding.from_embedding(torch.nn.Embedding(100, 64), mc.nn.QuantConfig("int4", 32))
    >>> table(torch.tensor([[1, 2]])).shape, table.qweight.nbytes
    (torch.Size([1, 2, 64]), 3200)
    """

    qweight: Tensor
    scale: Tensor
    minimum: Tensor | None

    def __init__(self, weight: GroupTensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.config = QuantConfig(f"int{weight.bits}", weight.group, weight.minimum is None, "none")
        self.dtype = dtype
        self.kind = self.config.weight, weight.group, self.config.symmetric, self.config.clip
        self.register_buffer("qweight", weight.data)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("minimum", weight.minimum)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, config: QuantConfig | None = None) -> QuantEmbedding:
        """Quantize an ``nn.Embedding``.

        Parameters
        ----------
        embedding : nn.Embedding
            Without `max_norm`.
        config : QuantConfig, optional
            int8 or int4 with its groups; `act` and `activation` are not read. Default: int8 with a scale per row.

        Raises
        ------
        ValueError
            For a float format, or an embedding with `max_norm`.
        """
        config = config or QuantConfig()
        if not config.is_integer:
            raise ValueError(f"config must have an integer weight, got {config.weight!r}")
        if embedding.max_norm is not None:
            raise ValueError("embedding must have no max_norm, which writes its weight")
        weight = embedding.weight
        if weight.is_meta:
            shapes = weight_shapes(weight.shape[0], weight.shape[1], config)
            made = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
            found = GroupTensor(
                made["qweight"], made["scale"], made.get("minimum"), config.bits, config.group_size, weight.shape[1]
            )
        else:
            found = quantize_groups(
                weight, config.bits, config.group_size, symmetric=config.symmetric, clip=config.clip
            )
        table = cls(found, weight.dtype)
        table.kind = config.weight, config.group_size, config.symmetric, config.clip
        return table

    def forward(self, ids: Tensor) -> Tensor:
        data, scale = self.qweight[ids], self.scale[ids]  # (..., features), (..., groups)
        ints = data if self.config.bits == 8 else unpack4(data, self.embedding_dim, True)
        y = ints.float() * self._spread(scale)
        return (y if self.minimum is None else y + self._spread(self.minimum[ids])).to(self.dtype)

    def _spread(self, x: Tensor) -> Tensor:
        group = self.config.group_size
        return x if group is None else x.repeat_interleave(group, -1)[..., : self.embedding_dim]

    def quantized(self) -> GroupTensor:
        """Return the quantized weight, (rows, features)."""
        config = self.config
        return GroupTensor(self.qweight, self.scale, self.minimum, config.bits, config.group_size, self.embedding_dim)

    @property
    def compressed_bytes(self) -> int:
        """Bytes of the tensors."""
        return self.quantized().nbytes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantEmbedding:
        kept: dict[str, Any] = {"scale": self.scale, "minimum": self.minimum}
        probe = fn(torch.empty(0, dtype=self.dtype, device="cpu"))  # the dtype of lookups follows that of the model
        super()._apply(fn, recurse)
        for name, before in kept.items():
            if before is not None and getattr(self, name).dtype != before.dtype:
                setattr(self, name, before.to(getattr(self, name).device))
        self.dtype = probe.dtype
        return self

    def extra_repr(self) -> str:
        """Return the options for ``repr``."""
        config = self.config
        return f"{self.num_embeddings}, {self.embedding_dim}, weight={config.weight}, group_size={config.group_size}"
