"""Multi-head attention with a sparse mask and quantized products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from magicube_cutlass.attention import sparse_attention
from magicube_cutlass.attention.api import Backend, renamed_backend
from magicube_cutlass.checks import check_tensor
from magicube_cutlass.formats.pattern import Pattern

__all__ = ["SparseQuantAttention"]


def _moved(mask: Pattern, place: torch.device) -> Pattern:
    """The mask on a device; one object for all who ask while one of them holds it: derived data is cached on it."""
    known: WeakValueDictionary[torch.device, Pattern] = mask._cache.setdefault("moved", WeakValueDictionary())
    found = known.get(place)
    if found is None:
        found = known[place] = mask.to(place)
    return found


class SparseQuantAttention(nn.Module):
    """Multi-head attention: ``out_proj(concat_h sparse_attention(q_h, k_h, v_h, mask))``.

    Projections as in :class:`torch.nn.MultiheadAttention`: `q_proj`, `k_proj`, `v_proj` and `out_proj` are
    ``nn.Linear`` layers, which :func:`magicube_cutlass.convert` finds by these names. Modules that share a mask share
    it on other devices too. Gradients as in :func:`magicube_cutlass.sparse_attention`.

    Parameters
    ----------
    embed_dim, num_heads, bias, batch_first
        As in ``nn.MultiheadAttention``; `batch_first` defaults to True.
    mask : Pattern or sequence of Pattern, shape (Lq, Lk)
        One for all heads or one per head, see :mod:`magicube_cutlass.masks`. Moves with the module; not in its state
        dict.
    softmax_bits, qkv_bits, causal, backend, impl
        As for :func:`magicube_cutlass.sparse_attention`.
    device, dtype
        Of the projections.

    Raises
    ------
    ValueError
        If `num_heads` does not divide `embed_dim`.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> layer = mc.nn.SparseQuantAttention(64, 2, mc.masks.local(32, 8))
    >>> layer(torch.randn(4, 32, 64)).shape
    torch.Size([4, 32, 64])
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    masks: tuple[Pattern, ...]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mask: Pattern | Sequence[Pattern],
        *,
        bias: bool = True,
        softmax_bits: int = 8,
        qkv_bits: int = 8,
        causal: bool = False,
        backend: Backend | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim = {embed_dim}, got {num_heads}")
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.softmax_bits, self.qkv_bits, self.causal = softmax_bits, qkv_bits, causal
        self.backend = backend if impl is None else renamed_backend(impl)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype))
        given = (mask,) if isinstance(mask, Pattern) else tuple(mask)
        if not isinstance(mask, Pattern) and len(given) != num_heads:
            raise ValueError(f"mask must have a pattern for each of the {num_heads} heads, got {len(given)}")
        place = torch.device("cpu" if device is None else device)
        self.masks = given if place.type == "meta" else tuple(_moved(one, place) for one in given)

    @classmethod
    def from_attention(
        cls,
        attention: nn.MultiheadAttention,
        mask: Pattern | Sequence[Pattern],
        *,
        softmax_bits: int = 8,
        qkv_bits: int = 8,
        causal: bool = False,
        backend: Backend | None = None,
    ) -> Self:
        """Make a module with copies of the weights of ``nn.MultiheadAttention``, without its dropout.

        Raises
        ------
        TypeError
            For another class.
        NotImplementedError
            For other sizes of keys and values, ``add_bias_kv`` or ``add_zero_attn``.
        """
        if not isinstance(attention, nn.MultiheadAttention):
            raise TypeError(f"attention must be a torch.nn.MultiheadAttention, got {type(attention).__name__}")
        if attention.in_proj_weight is None:
            raise NotImplementedError(f"attention must have keys and values of embed_dim = {attention.embed_dim}, got "
                                      f"kdim={attention.kdim}, vdim={attention.vdim}")  # fmt: skip
        if attention.bias_k is not None or attention.add_zero_attn:
            raise NotImplementedError("attention must not add keys of its own: add_bias_kv or add_zero_attn is set")
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        made = cls(
            attention.embed_dim, attention.num_heads, mask, bias=bias is not None, softmax_bits=softmax_bits,
            qkv_bits=qkv_bits, causal=causal, backend=backend, batch_first=attention.batch_first, device=weight.device,
            dtype=weight.dtype,
        )  # fmt: skip
        weights = (*weight.chunk(3), attention.out_proj.weight)
        biases = (None,) * 4 if bias is None else (*bias.chunk(3), attention.out_proj.bias)
        with torch.no_grad():
            for name, w, b in zip(("q_proj", "k_proj", "v_proj", "out_proj"), weights, biases, strict=True):
                layer = made.get_submodule(name)
                assert isinstance(layer, nn.Linear)
                layer.weight.copy_(w)
                if b is not None:
                    layer.bias.copy_(b)
        return made.train(attention.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        place = fn(self.masks[0].col_indices).device
        if place.type != "meta":
            self.masks = tuple(_moved(mask, place) for mask in self.masks)
        return self

    def _split(self, x: Tensor) -> Tensor:
        """(..., L, embed_dim) as (..., heads, L, head_dim), a view."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Parameters
        ----------
        query : Tensor, shape (..., Lq, embed_dim)
            Without `batch_first`, lengths come first: (L, N, embed_dim).
        key, value : Tensor, shape (..., Lk, embed_dim), optional
            Default: `query`; `key`.
        bias : Tensor, shape (..., Lk), optional
            float, added to the logits of all heads.
        key_padding_mask : Tensor, shape (..., Lk), optional
            bool, true for keys to ignore.

        Returns
        -------
        Tensor, shape of `query`
        """
        key = query if key is None else key
        value = key if value is None else value
        swap = not self.batch_first and query.ndim == 3
        if swap:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if key_padding_mask is not None:
            check_tensor("key_padding_mask", key_padding_mask, dtype=torch.bool)
            left_out = torch.zeros_like(key_padding_mask, dtype=torch.float32)
            left_out = left_out.masked_fill(key_padding_mask, -math.inf)
            bias = left_out if bias is None else bias + left_out
        if bias is not None and bias.ndim > 1:
            bias = bias.unsqueeze(-2)  # for the heads
        q, k, v = self._split(self.q_proj(query)), self._split(self.k_proj(key)), self._split(self.v_proj(value))
        options: dict[str, Any] = {
            "softmax_bits": self.softmax_bits,
            "qkv_bits": self.qkv_bits,
            "backend": self.__dict__.get("backend"),
        }
        mask = self.masks if len(self.masks) > 1 else self.masks[0]
        out = sparse_attention(q, k, v, mask, causal=self.causal, bias=bias, **options)
        y: Tensor = self.out_proj(out.transpose(-2, -3).flatten(-2))
        return y.transpose(0, 1) if swap else y

    def extra_repr(self) -> str:
        """Return the options for ``repr``."""
        density = sum(mask.density for mask in self.masks) / len(self.masks)
        return (
            f"{self.embed_dim}, {self.num_heads}, mask={self.masks[0].shape} of density {density:.4g}, "
            f"softmax_bits={self.softmax_bits}, qkv_bits={self.qkv_bits}, causal={self.causal}"
        )
