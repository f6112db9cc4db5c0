"""Times of whole linear layers on this CPU, float to float, beside float32 and dynamic int8 of torch and ONNX Runtime.

``magicube bench`` and ``benchmarks/cpu_layers.py`` print them. Each output is compared for equality with the int64
product of the quantized operands. torch's dynamic layer is not exact without VNNI: its activations have 7 bits there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from magicube_cutlass.bench.problems import dynamic_linear, onnx_linear
from magicube_cutlass.bench.timing import Timing, measure
from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.linear import SparseQuantLinear
from magicube_cutlass.quantization.quantize import quantize

SHAPES = ((384, 384), (1536, 384), (384, 1536), (4096, 4096))  # out, in
TOKENS = (1, 2, 4, 16, 64, 400)
SPARSITIES = (0.0, 0.5, 0.9)
OURS = "ours, "  # and the share of zeros, or the format of dense weights: names of our layers
SPARSE = ("torch CSR, ", "scipy CSR, ")  # float32 products of the same zeros
_MOST = 2**31  # multiply-adds of a product
# Relative errors that activations of a format may cause; without one, what 16-bit floats round.
_ERRORS = {"none": 0.004, "int8": 0.02, "e4m3": 0.05, "e4m3_g128": 0.05, "mxfp8": 0.05, "mxfp4": 0.25, "nvfp4": 0.2}


class LayerTimes(NamedTuple):
    """Times of one layer and number of tokens, by name, in microseconds: the best and the median of all rounds."""

    out: int
    inner: int
    tokens: int
    us: dict[str, float]
    median_us: dict[str, float]

    @property
    def baseline(self) -> str:
        """Name of the fastest dense layer that is not ours."""
        return min((name for name in self.us if not name.startswith((OURS, *SPARSE))), key=self.us.__getitem__)

    def baseline_of(self, name: str) -> str:
        """Return the name of the fastest layer that can stand for the layer of ours of this name."""
        zeros = name.removeprefix(OURS)
        sparse = [f"{each}{zeros}" for each in SPARSE if f"{each}{zeros}" in self.us]
        return min((self.baseline, *sparse), key=self.us.__getitem__)

    def speed_up(self, name: str) -> float:
        """Return the time of the fastest baseline by that of the layer of this name."""
        return self.us[self.baseline_of(name)] / self.us[name]


def baselines(linear: nn.Linear) -> dict[str, Callable[[Tensor], object]]:
    """Return layers by name: of torch, bfloat16 if the CPU has instructions for it, and of ONNX Runtime if present.

    On a GPU: float32 and float16.
    """
    found: dict[str, Callable[[Tensor], object]] = {"float32": linear}
    if linear.weight.is_cuda:
        short = nn.Linear(linear.in_features, linear.out_features, device="cuda").half()
        found["float16"] = lambda x: short(x.half()).float()
        return found
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        half = nn.Linear(linear.in_features, linear.out_features).bfloat16()
        found["bfloat16"] = lambda x: half(x.bfloat16()).float()
    dynamic = dynamic_linear(linear)
    if dynamic is not None:
        found["torch dynamic int8"] = dynamic
    onnx = onnx_linear(linear)
    if onnx is not None:
        found["ONNX Runtime int8"] = onnx
    return found


def sparse_names(layer: SparseQuantLinear, zeros: float) -> dict[str, Callable[[Tensor], object]]:
    """Return float32 products with the nonzeros of a layer by name: of torch's CSR and of scipy's, on a CPU."""
    dense = layer.matrix().to_dense()  # (out, in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR a beta
        ours = dense.to_sparse_csr()
    theirs = layer.matrix().to_scipy()
    return {
        f"{SPARSE[0]}{zeros:g}": lambda x: ours @ x.mT,
        f"{SPARSE[1]}{zeros:g}": lambda x: theirs @ x.mT.numpy(),
    }


def check_layer(layer: SparseQuantLinear, x: Tensor, name: str) -> None:
    """Raise `ArithmeticError` unless the layer gives the exact product of its integers, scaled."""
    matrix, q = layer.matrix(), quantize(x, bits=8, scale="row")
    assert matrix.scale is not None and q.scale is not None and layer.bias is not None
    ints, dense = q.ints().cpu().long(), matrix.to_dense(dequantize=False).cpu().long()  # CUDA has no int64 product
    total = (ints @ dense.mT).to(x.device)  # (tokens, out)
    expected = total.float() * matrix.scale.flatten() * q.scale + layer.bias
    found = layer(x)
    is_equal = torch.equal(found, expected)
    if x.is_cuda:  # the epilogue may round once where torch rounds twice
        is_equal = torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    if not is_equal:
        raise ArithmeticError(f"{name}: the layer is not the exact product")


def format_config(text: str) -> QuantConfig:
    """Return the options of dense weights by their short name: a format, a group size, a format of activations.

    Raises
    ------
    ValueError
        For another text, and as :class:`QuantConfig`.

    Examples
    --------
    >>> format_config("int4-g32:none").group_size, format_config("mxfp4").act
    (32, 'mxfp8')
    """
    found = re.fullmatch(r"(\w+?)(?:-g(\d+))?(?::(\w+))?", text)
    if found is None:
        raise ValueError(f"format must be WEIGHT, WEIGHT-gGROUP or WEIGHT:ACTIVATIONS, such as int4-g128, got {text!r}")
    return QuantConfig(found[1], int(found[2]) if found[2] else None, act=found[3] or "")


def check_format(layer: QuantLinear, x: Tensor, found: Tensor, name: str) -> None:
    """Raise `ArithmeticError` unless an output is near that of the weight in its format and float activations."""
    assert layer.bias is not None
    expected = x.double() @ layer.dequantize().double().mT + layer.bias.double()
    error = float((found.double() - expected).norm() / expected.norm())
    most = _ERRORS[layer.config.act]
    if not error <= most:
        raise ArithmeticError(f"{name}: the layer must be within {most} of the product of its weight, got {error:.2g}")


@torch.inference_mode()
def time_layers(
    out: int,
    inner: int,
    tokens: Sequence[int] = TOKENS,
    sparsities: Sequence[float] = SPARSITIES,
    vector_length: int = 8,
    budget: float = 0.4,
    *,
    device: str = "cpu",
    has_sparse_baselines: bool = False,
    formats: Sequence[str] = (),
    is_alone: bool = False,
) -> Iterator[LayerTimes]:
    """Time layers of one shape with torch's threads.

    Parameters
    ----------
    out, inner : int
        Features.
    tokens : sequence of int
        Rows of the input; products of more than 2^31 multiply-adds are left out.
    sparsities : sequence of float
        Shares of zeros of our layers, frozen, with bias.
    vector_length : int
        V of their vectors.
    budget : float
        Seconds per layer and number of tokens.
    device : str, default "cpu"
        ``"cuda"`` times whole calls, the wait for the GPU included.
    has_sparse_baselines : bool, default False
        Time the products of torch's and scipy's CSR as well.
    formats : sequence of str
        Of dense weights, frozen, with bias, as :func:`format_config` takes them; on a GPU from and to float16 inside.
    is_alone : bool, default False
        Call each layer in a loop of its own, so that its weight stays in the caches, not all in turn.

    Yields
    ------
    LayerTimes

    Raises
    ------
    ArithmeticError
        If an output is not the exact product, or, of a format, not near it.
    ValueError
        For a format that does not exist, or does not fit the features.
    """
    torch.manual_seed(out + inner)
    linear = nn.Linear(inner, out, device=device)
    ours = {
        f"{OURS}{zeros:g}": SparseQuantLinear.from_linear(linear, zeros, vector_length).eval().freeze()
        for zeros in sparsities
    }
    dense = {f"{OURS}{text}": QuantLinear.from_linear(linear, format_config(text)).eval().freeze() for text in formats}
    calls: dict[str, Callable[[Tensor], object]] = {**baselines(nn.Linear(inner, out, device=device)), **ours}
    for name, each in dense.items():
        calls[name] = each if device == "cpu" else partial(_in_float16, each.half())
    if has_sparse_baselines and device == "cpu":
        for zeros, layer in zip(sparsities, ours.values(), strict=True):
            calls |= sparse_names(layer, zeros) if zeros >= 0.5 else {}
    wait = torch.cuda.synchronize if device == "cuda" else None
    for count in tokens:
        if count * out * inner > _MOST:
            continue
        x = torch.randn(count, inner, device=device)
        for name, layer in ours.items():
            check_layer(layer, x, f"{out} x {inner}, {count} tokens, {name}")
        for name, each in dense.items():
            found = calls[name](x)
            assert isinstance(found, Tensor)
            check_format(each, x, found, f"{out} x {inner}, {count} tokens, {name}")
        timed = {name: partial(call, x) for name, call in calls.items()}
        times: dict[str, Timing] = {}
        for group in [{name: call} for name, call in timed.items()] if is_alone else [timed]:
            times |= measure(group, budget=budget, max_runs=2000 if is_alone else 200, synchronize=wait)
        best = {name: each.best * 1e6 for name, each in times.items()}
        yield LayerTimes(out, inner, count, best, {name: each.median * 1e6 for name, each in times.items()})


def _in_float16(layer: QuantLinear, x: Tensor) -> Tensor:
    found: Tensor = layer(x.half())
    return found.float()


def as_row(times: LayerTimes) -> dict[str, object]:
    """Return the times as a row of a results file."""
    return {"out": times.out, "in": times.inner, "tokens": times.tokens, "us": times.us, "median_us": times.median_us}
