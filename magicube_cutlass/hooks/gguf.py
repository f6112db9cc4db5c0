"""Weights of GGUF files in the formats of this library, without requantizing: Q4_0, Q4_1, Q8_0 and Q4_K.

The blocks of these formats are groups of 32 with a scale, and those of Q4_1 and Q4_K with a minimum, which is what
:class:`GroupTensor` holds: the integers are the file's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.dense.embedding import QuantEmbedding
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.report import ConversionReport, ConversionRow
from magicube_cutlass.nn.weight_modules import has_weight, kind_of_module, set_module, weight_shape
from magicube_cutlass.quantization.group_tensor import GroupTensor

__all__ = ["read_gguf", "take_gguf"]

GROUP = 32
_CHUNK = 4096  # rows compared at a time
_Blocks = np.ndarray[Any, np.dtype[np.uint8]]  # (rows, blocks, bytes)


def _floats(x: _Blocks) -> Tensor:
    """float16 numbers as float32, (rows, blocks)."""
    return torch.from_numpy(x.copy().view(np.float16).astype(np.float32)[..., 0])


def _nibbles(x: _Blocks) -> Tensor:
    """Unsigned integers (rows, K) of blocks (rows, blocks, 16): low nibbles first."""
    both = np.concatenate([x & 15, x >> 4], axis=-1)  # (rows, blocks, 32)
    return torch.from_numpy(both.reshape(both.shape[0], -1).astype(np.int8))


def _q4_0(x: _Blocks) -> GroupTensor:
    return GroupTensor.from_ints(_nibbles(x[..., 2:]) - 8, _floats(x[..., :2]), bits=4, group=GROUP)


def _q4_1(x: _Blocks) -> GroupTensor:
    """``d u + m`` with u in 0..15: ``d (u - 8) + (m + 8 d)``."""
    scale, low = _floats(x[..., :2]), _floats(x[..., 2:4])
    return GroupTensor.from_ints(_nibbles(x[..., 4:]) - 8, scale, low + 8 * scale, bits=4, group=GROUP)


def _q8_0(x: _Blocks) -> GroupTensor:
    ints = torch.from_numpy(x[..., 2:].copy().view(np.int8).reshape(x.shape[0], -1))
    return GroupTensor.from_ints(ints, _floats(x[..., :2]), bits=8, group=GROUP)


def _q4_k(x: _Blocks) -> GroupTensor:
    """Blocks of 256: eight groups whose scales and minima are 6-bit integers times two floats."""
    d, low, packed, q = x[..., :2], x[..., 2:4], x[..., 4:16], x[..., 16:]
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=-1)  # (rows, blocks, 8)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=-1)
    scale = _floats(d)[..., None] * torch.from_numpy(scales.astype(np.float32))
    minimum = 8 * scale - _floats(low)[..., None] * torch.from_numpy(minima.astype(np.float32))
    halves = (
        q.reshape(*q.shape[:2], 4, 1, 32) >> np.array([0, 4], dtype=np.uint8)[:, None] & 15
    )  # low, then high nibbles
    ints = torch.from_numpy(halves.reshape(x.shape[0], -1).astype(np.int8)) - 8
    return GroupTensor.from_ints(ints, scale.flatten(1), minimum.flatten(1), bits=4, group=GROUP)


_READERS: dict[str, Callable[[_Blocks], GroupTensor]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k}


def read_gguf(path: str | os.PathLike[str]) -> dict[str, GroupTensor | Tensor]:
    """Return the tensors of a GGUF file by their names in the file.

    Parameters
    ----------
    path : str or path-like
        GGUF file.

    Returns
    -------
    dict
        :class:`GroupTensor` of shape (out, in) for matrices in Q4_0, Q4_1, Q8_0 and Q4_K; float32 tensors for all
        else. Dequantized, they are the file's values; a minimum of Q4_1 or Q4_K, a sum of two float32 numbers, may be
        rounded once.

    Raises
    ------
    ValueError
        If it is no GGUF file.
    """
    found: dict[str, GroupTensor | Tensor] = {}
    for each in gguf.GGUFReader(os.fspath(path)).tensors:
        read = _READERS.get(each.tensor_type.name)
        if read is None or each.data.ndim != 2:
            values = gguf.quants.dequantize(each.data, each.tensor_type)
            found[each.name] = torch.from_numpy(np.array(values, dtype=np.float32))
            continue
        size = gguf.GGML_QUANT_SIZES[each.tensor_type][1]
        found[each.name] = read(np.asarray(each.data).reshape(each.data.shape[0], -1, size))
    return found


def _orders(rows: int, config: Any) -> Iterator[Tensor | None]:
    """Orders of the rows in which a file may hold a weight: as it is, or the two halves of each head interleaved."""
    yield None
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads and rows % (2 * heads) == 0:
            yield torch.arange(rows, device="cpu").view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _rows(weight: GroupTensor, rows: Tensor) -> GroupTensor:
    """The given rows of a weight."""
    minimum = None if weight.minimum is None else weight.minimum[rows]
    return GroupTensor(weight.data[rows], weight.scale[rows], minimum, weight.bits, weight.group, weight.k)


def _is_close(stored: GroupTensor, weight: Tensor) -> bool:
    return torch.allclose(stored.dequantize(), weight.float(), rtol=1e-5, atol=1e-6)


def _matching(weight: Tensor, stored: GroupTensor, config: Any) -> GroupTensor | None:
    """The file's weight in the row order of a loaded float one; None if they differ."""
    if tuple(weight.shape) != stored.shape:
        return None
    for order in _orders(weight.shape[0], config):
        several = torch.arange(weight.shape[0], device="cpu")[:: max(1, weight.shape[0] // 16)]  # before all of them
        taken = several if order is None else order[several]
        if not _is_close(_rows(stored, taken), weight[several]):
            continue
        found = stored if order is None else _rows(stored, order)
        parts = torch.arange(weight.shape[0], device="cpu").split(_CHUNK)
        if all(_is_close(_rows(found, part), weight[part]) for part in parts):
            return found
    return None


def take_gguf(
    model: Any, path: str | os.PathLike[str], *, embeddings: bool = False, act: str = "int8"
) -> ConversionReport:
    """Replace the layers of a model that transformers loaded from a GGUF file by the file's own integers, in place.

    ``AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)`` makes float weights. Each is compared with the
    file's tensor of its name; only equal ones are replaced.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As loaded, before any change.
    path : str or path-like
        The same file.
    embeddings : bool, default False
        Replace the embedding too.
    act : str, default "int8"
        Activations, as for :class:`magicube_cutlass.nn.QuantConfig`.

    Returns
    -------
    ConversionReport
        Each module with a weight, replaced or left for a reason.
    """
    stored = read_gguf(path)
    architecture = gguf.MODEL_ARCH_NAMES
    arch = next(key for key, name in architecture.items() if name == _architecture(path))
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    total = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    table = model.get_input_embeddings().weight
    rows = []
    for name, layer in [each for each in model.named_modules() if has_weight(each[1])]:
        key = names.get_name(name)
        weight = layer._parameters.get("weight")
        if weight is table and f"{key}.weight" not in stored:  # a tied head
            key = "token_embd"
        found, kind = stored.get(f"{key}.weight"), kind_of_module(layer)
        note = "" if kind == "linear" or (kind == "embedding" and embeddings) else f"left: a {type(layer).__name__}"
        if not note and not isinstance(found, GroupTensor):
            note = "left: no quantized tensor of this name in the file"
        taken = None
        if not note and weight is not None and isinstance(found, GroupTensor):
            taken = _matching(weight.detach(), found, model.config)
            note = "" if taken is not None else "left: the file's tensor has other values"
        before = sum(each.nbytes for each in layer._parameters.values() if each is not None)
        shape, kind = weight_shape(layer), kind or type(layer).__name__
        if taken is None or weight is None:
            rows.append(ConversionRow(name, shape, None, before, before, note, kind))
            continue
        new = _replacement(layer, taken, weight.dtype, act)
        set_module(model, name, new)
        rows.append(ConversionRow(name, shape, new.config, before, new.compressed_bytes, "", kind))
    return ConversionReport(tuple(rows), total)


def _replacement(layer: nn.Module, weight: GroupTensor, dtype: torch.dtype, act: str) -> QuantLinear | QuantEmbedding:
    if isinstance(layer, nn.Embedding):
        return QuantEmbedding(weight, dtype)
    bias = layer._parameters.get("bias")
    return QuantLinear.from_quantized(weight, None if bias is None else bias.detach(), QuantConfig(act=act))


def _architecture(path: str | os.PathLike[str]) -> str:
    found = gguf.GGUFReader(os.fspath(path)).fields["general.architecture"]
    return bytes(found.parts[found.data[0]]).decode()
