"""Other libraries' products on the same data, or on data of the same density where they want another structure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels import jit
from cute_kernels.jit.warmup import Source
from harness.blocked_ell import BlockedEllProduct, Blocks, CusparseError, forms, half_forms, right_result
from harness.gpu_data import OUT, OUT_NAME, Product, one_line, random_ints
from harness.gpu_timing import Call
from magicube_cutlass.dispatch.dense_fallback import DenseCall

SAME = "the same matrix, zeros filled in"


@dataclass(frozen=True)
class Baseline:
    """``call`` returns the product, ``expected`` is the same without rounding, float64; ``data``: which matrix."""

    call: Callable[[], Tensor]
    expected: Tensor
    data: str
    note: str = ""

    def error(self) -> float:
        """Largest error relative to the largest result."""
        return float((self.call().double() - self.expected).abs().max() / self.expected.abs().max())


def _columns(b: Tensor) -> Tensor:
    return b.t().contiguous().t()


def _int8(product: Product) -> tuple[Tensor, Tensor]:
    return product.lhs.to_dense(dequantize=False).contiguous(), product.rhs.ints().contiguous()


def dense_half(product: Product, dtype: torch.dtype) -> Baseline:
    """torch's dense product of the dequantized operands."""
    a, b = product.lhs.to_dense().to(dtype), product.rhs.dequantize().to(dtype)
    return Baseline(lambda: a @ b, product.expected.double(), SAME)


def _padded(b: Tensor, multiple: int) -> Tensor:
    """``b`` (K, N), column-major, with zero columns up to a multiple."""
    return _columns(torch.nn.functional.pad(b, (0, -b.shape[1] % multiple)))


def dense_int8(product: Product) -> Baseline:
    """torch's dense int8 product with B column-major, which is the faster layout; int32 output.

    It takes multiples of 8 columns: B is padded before.
    """
    a, b = _int8(product)
    n, right = b.shape[1], _padded(b, 8)
    return Baseline(lambda: torch._int_mm(a, right)[:, :n], a.double() @ b.double(), SAME, "int32 output")


def dense_fp8(product: Product) -> Baseline:
    """torch's dense e4m3 product, fast accumulation, float16 output; it takes multiples of 16 columns."""
    a, n = product.lhs.to_dense().to(torch.float8_e4m3fn), product.rhs.shape[-1]
    b = _columns(_padded(product.rhs.dequantize(), 16).to(torch.float8_e4m3fn))
    one = torch.ones((), device="cuda")

    def call() -> Tensor:
        result: Tensor = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float16, use_fast_accum=True)
        return result[:, :n]

    return Baseline(call, product.expected.double(), SAME, "values rounded to 8-bit floats")


def own_dense(product: Product) -> Baseline:
    """This library's dense int8 product, scales in the kernel, B column-major: what ``allow_dense`` can come to."""
    b = mc.QuantTensor.from_ints(_columns(product.rhs.ints()), bits=8, scale=product.rhs.scale)
    call = DenseCall(product.lhs, b, OUT)
    return Baseline(lambda: call(b.data, b.scale, None, None), product.expected.double(), SAME)


def own_floats(product: Product, left: str, right: str) -> Baseline:
    """This library's product of the same matrix as floats, small ones with one scale; the error is that of the sums."""
    lhs, x = product.lhs, product.rhs.dequantize()
    mask = lhs.pattern.to_dense()
    a = mc.SRBCRS.from_mask(lhs.to_dense(), mask, vector_length=lhs.vector_length, stride=lhs.stride, dtype=left)
    b = x.half() if right == "float16" else mc.quantize(x, dtype=right)
    expected = a.to_dense().double() @ (b.double() if isinstance(b, Tensor) else b.dequantize().double())
    return Baseline(lambda: mc.spmm(a, b, out_dtype=OUT), expected, "the same matrix", f"{left} x {right}")


def gemm_configs() -> list[Source]:
    """Every kernel that :func:`own_dense` and ``allow_dense`` may use."""
    from cute_kernels.convert.pack import PackConfig
    from cute_kernels.gemm.config import Products
    from cute_kernels.gemm.heuristics import candidates

    tiles = [replace(config, out=OUT_NAME).side_by_side for config in candidates(Products(1, 1, 1), jit.current_arch())]
    return [*tiles, PackConfig("pack_transposed"), PackConfig("pack_strided")]


def csr_half(product: Product) -> Baseline:
    """cuSPARSE's float16 product of the same matrix as CSR, through torch."""
    a = product.lhs.to_dense().half().to_sparse_csr()
    b = product.rhs.dequantize().half()
    return Baseline(lambda: a @ b, product.expected.double(), "the same matrix, CSR")


def two_of_four(product: Product) -> Baseline:
    """cuSPARSELt's int8 product, two of four entries zero, the algorithm that its search finds; bfloat16 output."""
    m, k = product.lhs.shape
    ints = random_ints((m, k), 8, True, 3).to(torch.int8)
    order = torch.rand(m, k // 4, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(4)).argsort(-1)
    a = torch.where(order.view(m, k) < 2, ints, torch.zeros_like(ints))
    b = _columns(product.rhs.ints())
    compressed = torch._cslt_compress(a)
    found = torch._C._cusparselt.mm_search(compressed, b, None, None, torch.bfloat16, False)  # type: ignore[attr-defined]
    number, split, split_mode = found[:3]
    way = (None, None, torch.bfloat16, False, number, split, split_mode)  # no bias, no alpha, not transposed

    def call() -> Tensor:
        return torch._cslt_sparse_mm(compressed, b, *way)

    note = f"bfloat16 output, algorithm {number}, split-k {split}"
    return Baseline(call, a.double() @ b.double(), "2:4 sparsity (half dense)", note)


def make_blocks(product: Product, size: int) -> Blocks:
    """Random blocks of A's density, the same number in each row of blocks."""
    m, k = product.lhs.shape
    rows, columns = m // size, k // size
    count = max(1, round(product.lhs.density * columns))
    order = torch.rand(rows, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).argsort(-1)
    values = random_ints((rows, count, size, size), 8, True, 6).to(torch.int8)
    return Blocks(order[:, :count].sort(-1).values.to(torch.int32), values, k)


def torch_bsr(product: Product, size: int) -> Baseline:
    """torch's product of a float16 BSR matrix."""
    blocks = make_blocks(product, size)
    scale = float(product.lhs.scale) if product.lhs.scale is not None else 1.0
    b = product.rhs.dequantize().half()
    rows, count = blocks.columns.shape
    start = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * count
    values = (blocks.values.flatten(0, 1).float() * scale).half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BSR is in beta
        a = torch.sparse_bsr_tensor(start, blocks.columns.flatten(), values, size=(blocks.rows, blocks.inner))
    expected = blocks.dense().double() @ b.double() * scale
    return Baseline(lambda: a @ b, expected, f"{size} x {size} blocks of the same density")


def blocked_ell(product: Product, size: int) -> Baseline:
    """cuSPARSE's int8 Blocked-ELL product, in the first form that gives the right result."""
    blocks, b = make_blocks(product, size), product.rhs.ints()
    exact = blocks.dense().double() @ b.double()
    failures = {}
    for form in forms():
        try:
            candidate = BlockedEllProduct(blocks, b, form)
        except CusparseError as error:
            failures[str(form)] = str(error)
            continue
        expected = right_result(form, exact)
        if torch.equal(candidate().double(), expected):
            return Baseline(candidate, expected, f"{size} x {size} blocks of the same density", str(form))
        failures[str(form)] = "wrong result"
    raise CusparseError("; ".join(f"{form}: {reason}" for form, reason in failures.items()))


def blocked_ell_half(product: Product, size: int) -> Baseline:
    """cuSPARSE's float16 Blocked-ELL product of the same blocks, in the first form that is right.  It has not run."""
    blocks, b = make_blocks(product, size), product.rhs.dequantize().half()
    scale = float(product.lhs.scale) if product.lhs.scale is not None else 1.0
    operands16 = replace(blocks, values=(blocks.values.float() * scale).half())
    expected, failures = operands16.dense().double() @ b.double(), {}
    for form in half_forms():
        try:
            found = Baseline(
                BlockedEllProduct(operands16, b, form),
                expected,
                f"{size} x {size} blocks of the same density",
                str(form),
            )
        except CusparseError as error:
            failures[str(form)] = str(error)
            continue
        if found.error() < 1e-2:
            return found
        failures[str(form)] = "wrong result"
    raise CusparseError("; ".join(f"{form}: {reason}" for form, reason in failures.items()))


BASELINES: dict[str, Callable[[Product], Baseline]] = {
    "dense fp16": lambda product: dense_half(product, torch.float16),
    "dense bf16": lambda product: dense_half(product, torch.bfloat16),
    "dense int8": dense_int8,
    "dense fp8": dense_fp8,
    "magicube dense int8": own_dense,
    "2:4 int8": two_of_four,
    "BSR fp16 8": lambda product: torch_bsr(product, 8),
    "BSR fp16 16": lambda product: torch_bsr(product, 16),
    "BSR fp16 32": lambda product: torch_bsr(product, 32),
    "Blocked-ELL int8 8": lambda product: blocked_ell(product, 8),
    "Blocked-ELL int8 16": lambda product: blocked_ell(product, 16),
}


def prepare(
    makers: dict[str, Callable[[], Baseline]],
) -> tuple[dict[str, Baseline], dict[str, str], dict[str, float]]:
    """The baselines that run, the failures of the others as text, and the errors of those that run."""
    baselines, failures, errors = {}, {}, {}
    warnings.filterwarnings("ignore", module="torch.sparse")  # untuned shapes of the BSR product
    for name, make in makers.items():
        try:
            baseline = make()
            errors[name] = baseline.error()
            torch.cuda.synchronize()
        except Exception as error:  # whatever a baseline raises is a result of the benchmark
            failures[name] = one_line(error)
        else:
            baselines[name] = baseline
    return baselines, failures, errors


def calls_of(baselines: dict[str, Baseline]) -> dict[str, Call]:
    return {name: baseline.call for name, baseline in baselines.items()}
