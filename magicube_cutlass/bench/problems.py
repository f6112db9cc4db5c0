"""Random operands, the exact check, and the dense baseline of the command line and the demo."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cute_kernels.gemm.cpu import dense_backend
from cute_kernels.integers import fits, int_range, product_bound
from magicube_cutlass import reference
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.quantization.quant_tensor import QuantTensor

FLOAT64_EXACT = 2**53  # float64 holds every integer up to here


def random_operand(rows: int, cols: int, bits: int, seed: int) -> QuantTensor:
    """Return uniform integers of the full signed range, without a scale."""
    low, high = int_range(bits, True)
    ints = torch.randint(low, high + 1, (rows, cols), generator=torch.Generator().manual_seed(seed), device="cpu")
    return QuantTensor.from_ints(ints, bits=bits)


def random_matrix(pattern: Pattern, bits: int, seed: int) -> SRBCRS:
    """Return uniform integers of the full signed range on a pattern."""
    low, high = int_range(bits, True)
    shape = (pattern.vectors, pattern.vector_length)
    vectors = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return SRBCRS.from_pattern(pattern, vectors, bits=bits)


def exact_dtype(inner: int, lhs_bits: int, rhs_bits: int) -> torch.dtype:
    """Return int32 if no sum of `inner` products can overflow it, else int64."""
    bound = product_bound(inner, lhs_bits, True, rhs_bits, True)
    return torch.int32 if fits(bound, torch.int32) else torch.int64


def exact_spmm(lhs: SRBCRS, rhs: QuantTensor) -> Tensor:
    """Return the integer product ``A B`` of two single matrices, (M, N) int64.

    Uses float64, which is exact while no sum reaches 2^53, in time and memory of the stored elements; else the int64
    reference.

    Raises
    ------
    ValueError
        For a matrix of results, which has no bits.
    """
    if lhs.bits is None:
        raise ValueError("lhs must be quantized integers, got a matrix of results")
    if product_bound(lhs.shape[1], lhs.bits, lhs.signed, rhs.bits, rhs.signed) >= FLOAT64_EXACT:
        return reference.spmm(lhs, rhs)
    left, right = lhs.to_scipy(dequantize=False).astype("float64"), rhs.ints().double().numpy()
    return torch.from_numpy(left @ right).to(torch.int64)


def check_product(lhs: SRBCRS, rhs: QuantTensor, product: Tensor) -> None:
    """Raise `ArithmeticError` with the first wrong element unless `product` is exact in each row."""
    expected = exact_spmm(lhs, rhs)
    wrong = (product.to(torch.int64) != expected).nonzero()
    if len(wrong):
        row, column = (int(x) for x in wrong[0])
        raise ArithmeticError(
            f"element ({row}, {column}) is {int(product[row, column])}, "
            f"the exact product has {int(expected[row, column])}"
        )


def dense_baselines(lhs: SRBCRS, rhs: QuantTensor) -> dict[str, Callable[[], object]]:
    """Return the dense products of the same matrices by name; the fastest one on this machine is the baseline.

    float32 ``torch.mm``, bfloat16 if the CPU has instructions for it, the linear layer of torch's ``quantize_dynamic``,
    and ``torch._int_mm`` in both memory orders of B if it is exact and no scalar loop here. Weights are prepared
    before; the dynamic layer quantizes B, which it takes as floats, in the call.

    Parameters
    ----------
    lhs : SRBCRS, shape (M, K)
        Sparse operand, as a dense matrix here.
    rhs : QuantTensor, shape (K, N)
        Dense operand.

    Returns
    -------
    dict of str to callable
        On a GPU: float16, and ``torch._int_mm`` of 8-bit operands whose sizes it takes.
    """
    if lhs.device.type == "cuda":
        return _cuda_baselines(lhs.to_dense(dequantize=False), rhs.ints())
    dense, right = lhs.to_dense(dequantize=False), rhs.ints()
    floats = dense.float(), right.float()
    half = dense.bfloat16(), right.bfloat16()
    found: dict[str, Callable[[], object]] = {"float32": lambda: floats[0] @ floats[1]}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # elsewhere it is a scalar loop: 1024^3 takes 3 s
        found["bfloat16"] = lambda: half[0] @ half[1]
    if lhs.bits in (4, 8) and rhs.bits in (4, 8):
        if (layer := dynamic_linear(_without_bias(floats[0]))) is not None:
            rows = floats[1].t().contiguous()  # (N, K)
            found["torch dynamic int8"] = lambda: layer(rows)
        if dense_backend() == "torch._int_mm":
            ints, columns = right.contiguous(), right.t().contiguous().t()
            found["torch._int_mm"] = lambda: torch._int_mm(dense, ints)
            found["torch._int_mm, column-major"] = lambda: torch._int_mm(dense, columns)
    return found


def _cuda_baselines(dense: Tensor, right: Tensor) -> dict[str, Callable[[], object]]:
    """The dense products of ``dense`` (M, K) and ``right`` (K, N) on a GPU, by name."""
    half = dense.half(), right.half()
    found: dict[str, Callable[[], object]] = {"float16": lambda: half[0] @ half[1]}
    is_aligned = dense.shape[0] > 16 and dense.shape[1] % 8 == right.shape[1] % 8 == 0
    if dense.dtype == right.dtype == torch.int8 and is_aligned:
        columns = right.t().contiguous().t()  # (K, N), column-major
        found["torch._int_mm, column-major"] = lambda: torch._int_mm(dense, columns)
    return found


def dynamic_linear(linear: torch.nn.Linear) -> torch.nn.Module | None:
    """Return the layer of torch's ``quantize_dynamic``: int8 weights, input quantized in the call.

    None if this torch has no engine for it.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made: torch.nn.Module = torch.ao.quantization.quantize_dynamic(
                torch.nn.Sequential(linear), {torch.nn.Linear}, dtype=torch.qint8
            )
            made(torch.zeros(1, linear.in_features, device="cpu"))
        except (RuntimeError, NotImplementedError):
            return None
    return made


def onnx_linear(linear: torch.nn.Linear) -> Callable[[Tensor], Tensor] | None:
    """Return the layer by ONNX Runtime's ``quantize_dynamic``: int8 weights, a scale per output, torch's threads.

    None without the packages ``onnx`` and ``onnxruntime``.
    """
    try:
        import onnx
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError:
        return None
    make, floats = onnx.helper, onnx.TensorProto.FLOAT
    assert linear.bias is not None
    weight = onnx.numpy_helper.from_array(linear.weight.detach().t().contiguous().numpy(), "weight")
    bias = onnx.numpy_helper.from_array(linear.bias.detach().numpy(), "bias")
    nodes = [make.make_node("MatMul", ["x", "weight"], ["xw"]), make.make_node("Add", ["xw", "bias"], ["y"])]
    ends = [make.make_tensor_value_info(name, floats, ["n", size]) for name, size in
            (("x", linear.in_features), ("y", linear.out_features))]  # fmt: skip
    graph = make.make_graph(nodes, "linear", ends[:1], ends[1:], [weight, bias])
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    with tempfile.TemporaryDirectory() as folder:
        whole, quantized = Path(folder, "float32.onnx"), Path(folder, "int8.onnx")
        onnx.save(model, whole)
        logging.disable(logging.WARNING)  # advice to infer shapes first
        try:
            quantize_dynamic(whole, quantized, per_channel=True, weight_type=QuantType.QInt8)
        finally:
            logging.disable(logging.NOTSET)
        session = onnxruntime.InferenceSession(str(quantized), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _without_bias(weight: Tensor) -> torch.nn.Linear:
    """A linear layer with this weight (M, K)."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear
