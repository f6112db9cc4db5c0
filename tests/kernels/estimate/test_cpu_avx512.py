"""``csrc/avx512.cpp`` and ``csrc/avx_vnni.cpp`` on machines without their instructions, which are emulated; the rest is their own."""

from __future__ import annotations

import ctypes
import math
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from cute_kernels.cpu.arguments import OUT_TYPES, SparseOperand, address_of
from cute_kernels.cpu.calls import column_masks
from cute_kernels.cpu.dense import PackedRight, pack_right
from cute_kernels.cpu.direct import prepare_direct
from cute_kernels.cpu.estimate import PROBES, probe_right
from magicube_cutlass.dispatch.cpu import pack_operand
from magicube_cutlass.reference import at_vectors
from tests.kernels.estimate.avx512_engine import build_emulated_engine

AVX512, AMX, AVX_VNNI = 1, 2, 3  # instruction sets; 0 is the portable engine
VNNI = (AVX512, AVX_VNNI)
COLUMNS = (1, 3, 15, 16, 17, 33, 65, *(pytest.param(n, marks=pytest.mark.long) for n in (31, 64, 130)))
pytestmark = pytest.mark.skipif(shutil.which("g++") is None or not engine.available(), reason="no g++ or no engine")


class RealMatrix(ctypes.Structure):
    """``magicube::RealMatrix``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride")),
        *((name, ctypes.c_bool) for name in ("is_double", "column_major")),
    )

    @classmethod
    def of(cls, x: Tensor) -> RealMatrix:
        by_columns = x.stride(1) != 1
        return cls(x.data_ptr(), *x.shape, x.stride(int(by_columns)), x.dtype == torch.float64, by_columns)


@pytest.fixture(scope="module")
def emulated_engine(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_emulated_engine(tmp_path_factory.mktemp("avx512"))


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(x.data_ptr()) for x in tensors]


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + 7 * k + 31 * n)
    A, B, W = (torch.randn(*shape, generator=generator) for shape in ((m, k), (k, n), (n, PROBES)))
    return A, B, W, torch.linalg.vector_norm(W.double(), dim=1)


@pytest.mark.parametrize("n", COLUMNS)
def test_direct_has_the_bits_of_the_portable_engine(emulated_engine: ctypes.CDLL, n: int) -> None:
    for m in (1, 2, 3, 4, 5, 6, 7, 49):
        for k in (1, 4, 5, 66, 130):
            A, B, W, wbar = operands(m, k, n)
            A[0], B[:, 0] = 5.0, -5.0  # digits 127 and -127
            right = prepare_direct(B, W, wbar)
            results = []
            for emulated, threads in ((0, 1), (AVX512, 1), (AVX512, 2), (AMX, 2), (AVX_VNNI, 1)):
                out, sums = torch.empty(m, n), torch.empty(PROBES * PROBES + 2, dtype=torch.float64)
                emulated_engine.direct(
                    emulated, threads,
                    *pointers(right.packed, right.column_sums, right.scale, right.vectors, right.bounds),
                    ctypes.c_int64(k), ctypes.c_int64(n), *pointers(A), ctypes.c_int64(m), *pointers(out, sums),
                )  # fmt: skip
                results.append((out, sums))
            assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[1][1], results[2][1])
            assert torch.equal(results[3][0], results[1][0]) and torch.equal(results[3][1], results[1][1])
            assert torch.equal(results[4][0], results[1][0]) and torch.isclose(
                *(each[1][-1] for each in results[3:]), rtol=1e-13
            )
            (_, plain), (_, found) = results[:2]
            eta = 68 * 2.0**-24 * math.sqrt(float(plain[-2]))
            energies = [float(each[: -2 : PROBES + 1].sum()) for each in (plain, found)]
            assert abs(math.sqrt(energies[0]) - math.sqrt(energies[1])) <= 2 * eta
            assert bool(torch.isclose(found[-2:], plain[-2:], rtol=1e-5, atol=0).all())
            assert bool(torch.isclose(found[-1:], plain[-1:], rtol=1e-13, atol=0).all())


def multiply_emulated(
    library: ctypes.CDLL, emulated: int, threads: int, left: Tensor, right: PackedRight, out: Tensor, static: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:  # fmt: skip
    """``out`` by the engine's dense product: of int8, or of float32 rows that it quantizes."""

    def pointer(x: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if x is None else x.data_ptr())

    reals, (k, n) = left.is_floating_point(), right.shape
    library.dense(
        emulated, threads, *pointers(right.packed, right.column_sums), ctypes.c_int64(k), ctypes.c_int64(n),
        int(right.packed.dtype == torch.uint8), pointer(None if reals else left), pointer(left if reals else None), pointer(static),
        *map(ctypes.c_int64, (left.stride(0), left.shape[0])), *map(pointer, scales), *map(ctypes.c_int64, out.stride()),
        OUT_TYPES[out.dtype], pointer(out),
    )  # fmt: skip


@pytest.mark.parametrize("n", COLUMNS)
def test_dense_products_are_exact(emulated_engine: ctypes.CDLL, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for m in (1, 2, 5, 6, 7, 13, 49, 100):
        for k in (1, 4, 5, 66, 390):
            a, b = (torch.randint(-128, 128, size, generator=generator, dtype=torch.int8) for size in ((m, k), (k, n)))
            a[0], b[:, 0] = -128, -128
            right, expected = pack_right(b), a.long() @ b.long()
            for emulated, threads in ((AVX512, 1), (AVX512, 2), (AMX, 1), (AMX, 2), (AVX_VNNI, 1), (AVX_VNNI, 2)):
                for dtype in (torch.int32, torch.int64):
                    for out in (torch.empty(m, n, dtype=dtype), torch.empty(n, m, dtype=dtype).t()):
                        multiply_emulated(emulated_engine, emulated, threads, a, right, out, None, (None, None, None))
                        assert torch.equal(out.long(), expected)
    k = 2**17 - 1
    a, b = torch.full((7, k), -128, dtype=torch.int8), torch.full((k, n), 127, dtype=torch.int8)
    a[1], b[:, -1] = 127, -128
    right, out = pack_right(b), torch.empty(7, n, dtype=torch.int32)
    for emulated in (AVX512, AMX, AVX_VNNI):
        multiply_emulated(emulated_engine, emulated, 1, a, right, out.zero_(), None, (None, None, None))
        assert torch.equal(out.long(), a.long() @ b.long())


@pytest.mark.parametrize("n", COLUMNS)
def test_dense_products_by_nibbles_are_exact(emulated_engine: ctypes.CDLL, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for m in (1, 2, 5, 6, 7, 13, 49, 100):
        for k in (1, 4, 5, 66, 390, 1030):
            a = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
            b = torch.randint(-8, 8, (k, n), generator=generator, dtype=torch.int8)
            a[0], b[:, 0] = -128, -8
            right, expected = pack_right(b, bits=4), a.long() @ b.long()
            for emulated, threads in ((AVX512, 1), (AVX512, 2), (AVX_VNNI, 1)):
                for out in (torch.empty(m, n, dtype=torch.int32), torch.empty(n, m, dtype=torch.int32).t()):
                    multiply_emulated(emulated_engine, emulated, threads, a, right, out, None, (None, None, None))
                    assert torch.equal(out.long(), expected)


def multiply_sparse_emulated(
    library: ctypes.CDLL, emulated: int, threads: int, a: SparseOperand, b: Tensor, out: Tensor,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:  # fmt: skip
    """``out`` by the engine's sparse product with int8 or int16 columns of ``b`` (K, N)."""
    _, blocks, v, stride = a.planes.shape
    along = b.stride(0) == 1
    library.spmm(
        emulated, threads, *pointers(a.row_start, a.row_end, a.col_indices, a.planes, a.row_sums),
        *map(ctypes.c_int64, (blocks * v * stride, a.rows, a.columns)), v, stride, a.bits, int(a.signed),
        ctypes.c_void_p(None if a.masks is None else a.masks.data_ptr()), *pointers(b),
        ctypes.c_int64(b.stride(int(along)) * b.element_size()), int(along), 8 * b.element_size(), ctypes.c_int64(b.shape[1]),
        *(ctypes.c_void_p(address_of(scale)) for scale in scales), OUT_TYPES[out.dtype], *pointers(out),
    )  # fmt: skip


@pytest.mark.parametrize("n", (1, 2, 7, 16, 31, 64, 65, 200))
def test_sparse_products_are_exact(emulated_engine: ctypes.CDLL, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for v in (1, 2, 4, 8, 16):
        for m, k, a_type, b_type in (
            (41, 70, torch.int8, torch.int8),
            (16, 390, torch.int8, torch.int16),
            (9, 33, torch.int16, torch.int8),
        ):
            a, b = (
                torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max + 1, size, generator=generator).to(kind)
                for kind, size in ((a_type, (m, k)), (b_type, (k, n)))
            )
            a *= (torch.rand(m, k, generator=generator) < 0.4).to(a_type)
            a[0], b[:, 0] = torch.iinfo(a_type).min, torch.iinfo(b_type).min
            matrix = mc.SRBCRS.from_dense(a, vector_length=v, bits=8 * a.element_size())
            assert matrix.bits is not None
            sparse = SparseOperand(*pack_operand(matrix), m, k, matrix.bits, True)
            expected = a.long() @ b.long()
            for right in (b, b.t().contiguous().t()):
                for emulated, threads in ((AVX512, 1), (AVX512, 2), (AVX_VNNI, 1), (AVX_VNNI, 2)):
                    out = torch.empty(m, n, dtype=torch.int64)
                    multiply_sparse_emulated(emulated_engine, emulated, threads, sparse, right, out, (None, None, None))
                    assert torch.equal(out, expected)
            rows, columns, bias = (torch.rand(size, generator=generator) for size in (m, n, m))
            found = []
            for emulated in (0, *VNNI):
                out = torch.empty(m, n)
                multiply_sparse_emulated(emulated_engine, emulated, 1, sparse, b, out, (rows, columns, bias))
                found.append(out)
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("n", (33, 64, 100))
def test_long_sparse_rows_are_exact(emulated_engine: ctypes.CDLL, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for v, m in ((8, 24), (16, 48)):
        a, b = (torch.randint(-128, 128, size, generator=generator).to(torch.int8) for size in ((m, 1100), (1100, n)))
        a *= (torch.rand(m, 1100, generator=generator) < 0.6).to(torch.int8)
        a[v : 2 * v] = 0
        sparse = SparseOperand(*pack_operand(mc.SRBCRS.from_dense(a, vector_length=v, bits=8)), m, 1100, 8, True)
        for emulated in (AMX, AVX_VNNI):  # by tiles, and by parts of a row
            out = torch.empty(m, n, dtype=torch.int32)
            multiply_sparse_emulated(emulated_engine, emulated, 1, sparse, b, out, (None, None, None))
            assert torch.equal(out.long(), (a.double() @ b.double()).long())
        scales, found = tuple(torch.rand(size, generator=generator) for size in (m, n, m)), []
        for emulated in (0, AMX, AVX_VNNI):
            found.append(torch.empty(m, n))
            multiply_sparse_emulated(emulated_engine, emulated, 1, sparse, b, found[-1], scales)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("n", (1, 2, 3, 16))
@pytest.mark.parametrize("signed", (True, False))
def test_sparse_products_with_few_columns_are_exact(emulated_engine: ctypes.CDLL, n: int, signed: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    for v in (1, 2, 4, 8, 16):
        for m, k, bits, stride in ((41, 70, 8, 16), (16, 64, 4, 32), (9, 700, 8, 32), (33, 130, 8, 64)):
            low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
            dtype = torch.int8 if signed else torch.uint8
            a = torch.randint(low, high, (m, k), generator=generator).to(dtype)
            a *= torch.rand(m, k, generator=generator) < 0.3
            if k == 700:
                a[:, 40:] *= torch.rand(660, generator=generator) < 0.05  # few, but in the first word of the masks
            a[0, :40], b = high - 1, torch.randint(-128, 128, (k, n), generator=generator, dtype=torch.int8)
            b[:, 0] = -128
            matrix = mc.SRBCRS.from_dense(a, vector_length=v, bits=bits, signed=signed, stride=stride)
            sparse = SparseOperand(*pack_operand(matrix), m, k, bits, matrix.signed)
            masked, expected = replace(sparse, masks=column_masks(sparse)), a.long() @ b.long()
            assert masked.masks is not None
            for each in (sparse, masked):
                emulated_engine.set_vbmi(int(each is masked))
                for right in (b, b.t().contiguous().t()):
                    for emulated, dtype in product(VNNI, (torch.int32, torch.float32)):
                        out = torch.empty(m, n, dtype=dtype)
                        multiply_sparse_emulated(emulated_engine, emulated, 1, each, right, out, (None, None, None))
                        assert torch.equal(out.long(), expected)


@pytest.mark.parametrize("v", (1, 2, 4, 8, 32))
def test_sampled_products_are_exact(emulated_engine: ctypes.CDLL, v: int) -> None:
    generator = torch.Generator().manual_seed(v)
    for m, n, k, types in ((35, 70, 5, (8, 8)), (16, 33, 130, (16, 8)), (9, 40, 64, (8, 16))):
        x, y = (
            torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), size, generator=generator).to(
                getattr(torch, f"int{bits}")
            )
            for bits, size in zip(types, ((m, k), (n, k)), strict=True)
        )
        x[0], y[0] = -(2 ** (types[0] - 1)), -(2 ** (types[1] - 1))
        pattern = mc.random_pattern(m, n, 0.5, v, seed=v)
        padded, sizes = pattern.padded(32), map(ctypes.c_int64, (pattern.padded(32).col_indices.numel() // 32, m, n, k))
        expected = mc.SRBCRS.from_pattern(pattern, at_vectors(x.long() @ y.long().mT, pattern), bits=None).values
        head = (*pointers(padded.row_start, padded.row_end, padded.col_indices), *sizes, v)
        for emulated, threads in ((AVX512, 1), (AVX512, 2), (AVX_VNNI, 1)):
            out = torch.zeros_like(expected)
            emulated_engine.sddmm(
                emulated, threads, *head, *pointers(x), types[0], *pointers(y), types[1], *pointers(out)
            )
            assert torch.equal(out, expected)


@pytest.mark.parametrize("v", (1, 2, 4, 8, 32))
def test_attention_has_the_bits_of_the_portable_engine(emulated_engine: ctypes.CDLL, v: int) -> None:
    generator = torch.Generator().manual_seed(v)
    for queries, keys, depth, width in ((35, 70, 5, 3), (16, 300, 64, 64), (9, 40, 70, 130)):
        mask = mc.random_pattern(queries, keys, 0.4, v, seed=v)
        padded, sizes = mask.padded(32), (mask.padded(32).col_indices.numel(), queries, keys, depth, width)
        head = (*pointers(padded.row_start, padded.row_end, padded.col_indices), *map(ctypes.c_int64, sizes), v)
        shapes = (2, queries, depth), (2, keys, depth), (2, keys, width), (keys,)
        operands = [torch.randn(shape, generator=generator) for shape in shapes]
        operands[0][0, 3, 1], operands[1][1, 5] = math.nan, 0.0
        for given in (operands, operands[:3]):
            results = []
            for emulated, threads in ((0, 1), (AVX512, 1), (AVX512, 2), (AVX_VNNI, 1)):
                out, lse = torch.empty(2, queries, width), torch.empty(2, queries)
                bias = pointers(given[3]) if len(given) > 3 else [ctypes.c_void_p(None)]
                emulated_engine.attention(emulated, threads, *head, *pointers(*given[:3]), *bias, *pointers(out, lse))
                results.append(torch.cat((out, lse[..., None]), -1).nan_to_num(7.0))
            assert bool((results[0] == 7.0).any()) and all(torch.equal(each, results[0]) for each in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantized_rows_have_the_bits_of_the_portable_engine(emulated_engine: ctypes.CDLL, dtype: torch.dtype) -> None:
    m, k, n = 53, 130, 75
    generator = torch.Generator().manual_seed(1)
    x, b = (
        torch.randn(m, k, generator=generator),
        torch.randint(-128, 128, (k, n), generator=generator, dtype=torch.int8),
    )
    x[3, 2], x[4] = float("nan"), 0.0
    columns, bias = torch.rand(n, generator=generator), torch.randn(n, generator=generator)
    right = pack_right(b)
    for static in (None, torch.tensor(0.01)):
        results = []
        for emulated, threads in ((0, 1), (AVX512, 1), (AVX512, 2), (AVX_VNNI, 1)):
            out = torch.empty(m, n, dtype=dtype)
            multiply_emulated(emulated_engine, emulated, threads, x, right, out, static, (None, columns, bias))
            results.append(out.nan_to_num())
        assert all(torch.equal(each, results[0]) for each in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 4), (25, 70, 33), (50, 20, 130)])
def test_judge_agrees_with_the_portable_engine(
    emulated_engine: ctypes.CDLL, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    A, B, W, wbar = operands(*size)
    C = (A @ B + 1).to(dtype)
    A, B = A.to(dtype), B.to(dtype)
    BW, bound = probe_right(B, W, wbar)
    for view in (lambda x: x, lambda x: x.t().contiguous().t()):
        operands_in_order = [view(x) for x in (A, B, C)]
        matrices = [RealMatrix.of(x) for x in operands_in_order]
        results = []
        for emulated, threads in ((0, 1), (1, 1), (1, 2)):
            products, bounds, sums = (
                torch.empty_like(BW),
                torch.empty_like(bound),
                torch.empty(261, dtype=torch.float64),
            )
            emulated_engine.probe_right(
                emulated, threads, ctypes.byref(matrices[1]), *pointers(W, wbar, products, bounds)
            )
            emulated_engine.judge(
                emulated, threads, ctypes.byref(matrices[0]), ctypes.byref(matrices[2]),
                *pointers(BW, bound, W, wbar, sums),
            )  # fmt: skip
            results.append(torch.cat([products.view(-1), bounds, sums]))
        assert torch.equal(results[1], results[2])
        limit = torch.cat([bound.repeat_interleave(PROBES), bound, results[0][-4:-3].expand(256), results[0][-5:]])
        assert bool(((results[1] - results[0]).abs() <= 1e-13 * limit).all())
