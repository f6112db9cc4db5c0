"""The dense product on a GPU: every kernel, output and layout against float64, which holds the sums exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.gemm import NATIVE_INT4, Int4Matrix
from cute_kernels.gemm.api import _check, explain_gemm, gemm
from cute_kernels.gemm.config import MAX_PRODUCTS, GemmConfig, Products, select_products
from cute_kernels.gemm.cuda import gemm_cuda
from cute_kernels.gemm.epilogue import activate
from cute_kernels.gemm.heuristics import candidates
from cute_kernels.jit import get_kernel

pytestmark = pytest.mark.gpu

ARCH = "sm_90a" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "sm_80"
ARCHES = tuple(dict.fromkeys((ARCH, "sm_80")))  # the warps' kernel runs everywhere
SINGLE = Products(1, 1, 1)
OUTS = ("int32", "int64", "float16", "bfloat16", "float32")
# The last has several tiles for each block of a persistent grid.
SHAPES = [
    (1, 1, 1),
    (128, 128, 256),
    (300, 144, 520),
    (300, 144, 544),
    (257, 1000, 77),
    (513, 333, 1031),
    (64, 4096, 64),
    (2000, 64, 3),
    (2050, 200, 2200),
]
POISON = -7_654_321
TERMS = [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 3), (2, 2, 4), (3, 2, 5), (3, 3, 6), (3, 1, 3)]


def every(products: Products, out: str, source: str = "none") -> list[GemmConfig]:
    configs = [config for arch in ARCHES for config in candidates(products, arch)]
    return [replace(config, out=out, source=source) for config in configs]


def named(config: GemmConfig) -> str:
    return config.name


def ints(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8, device="cuda")


def total(a: list[Tensor], b: list[Tensor], products: Products, shift: int = 8) -> Tensor:
    sums = torch.zeros(a[0].shape[0], b[0].shape[1], dtype=torch.float64, device="cuda")
    for level in range(products.levels):
        for i, j in products.pairs(level):
            sums += (a[i].double() @ b[j].double()) * 2.0 ** (-shift * level)
    return sums


def run(a: Any, b: Any, config: GemmConfig, out: Tensor, **options: Any) -> Tensor:
    """The product by one config, whatever would be chosen."""
    given: dict[str, Any] = {
        "shift": 8,
        "scale_a": None,
        "scale_b": None,
        "alpha": 1.0,
        "beta": 0.0,
        "c": None,
        "bias": None,
    }
    given |= {"activation": None, "out_scale": None, "glu": False} | options
    return gemm_cuda(_check(a, b, config.products.number, **given, out=out, out_dtype=out.dtype), out, config)


def assert_near(got: Tensor, truth: Tensor, size: Tensor | float) -> None:
    """Within a rounding of the output type, and 2^-21 of the largest sum for roundings to float32 on the way."""
    bound = torch.finfo(got.dtype).eps * truth.abs() + 2.0**-21 * size
    assert bool(((got.double() - truth).abs() <= bound).all())


@pytest.mark.parametrize("config", [c for out in OUTS for c in every(SINGLE, out)], ids=named)
def test_each_kernel_writes_each_output_type_whole_and_nothing_else(config: GemmConfig) -> None:
    dtype = getattr(torch, config.out)
    for m, k, n in SHAPES:
        a, b = [ints(m, k, 1)], [ints(k, n, 2).t().contiguous().t()]
        truth = total(a, b, SINGLE)
        for left, width in ((1, n + 3), (8, n + 8 + -n % 8)):  # rows of the output lie unaligned, and aligned
            frame = torch.full((m + 2, left + width), POISON, device="cuda").to(dtype)
            out = frame[1 : m + 1, left : left + n]
            scale = 1.0 if dtype in (torch.int32, torch.int64) else 2.0**-12
            run(a, b, config, out, alpha=scale)
            assert torch.equal(out, truth.to(dtype) if scale == 1.0 else (truth * scale).float().to(dtype))
            out.copy_(frame[0, 0])
            assert bool((frame == frame[0, 0]).all()), "written outside"


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.configs([c for t in TERMS for out in ("float16", "float32") for c in every(select_products(*t), out)])
def test_each_number_of_terms_with_factors_and_bias(terms: tuple[int, int, int]) -> None:
    products = select_products(*terms)
    for m, k, n in SHAPES:
        a, b = [ints(m, k, i) for i in range(terms[0])], [ints(k, n, 9 + i) for i in range(terms[1])]
        generator = torch.Generator("cuda").manual_seed(m)
        left, right, bias = (torch.randn(size, generator=generator, device="cuda") for size in (m, n, n))
        alpha = 1 / (128 * k**0.5)
        sums = total(a, b, products, 7) * alpha * left.double()[:, None] * right.double()
        for out in ("float16", "float32"):
            for config in every(products, out):
                got = torch.full((m, n), torch.nan, dtype=getattr(torch, out), device="cuda")
                run(a, b, config, got, shift=7, scale_a=left, scale_b=right, bias=bias, alpha=alpha)
                assert_near(got, sums + bias.double(), sums.abs().max() + 4)


@pytest.mark.parametrize("n", [200, 224])  # pairs of columns, and runs of them
@pytest.mark.configs(
    [c for out in ("float16", "float32") for s in ("float16", "float32") for c in every(SINGLE, out, s)]
)
def test_c_is_added_from_any_type_and_may_be_the_output(n: int) -> None:
    m, k = 333, 512
    a, b = [ints(m, k, 1)], [ints(k, n, 2)]
    sums = total(a, b, SINGLE) * 2.0**-12
    for out in (torch.float16, torch.float32):
        for source in (torch.float16, torch.float32):
            c = torch.randn(m, n, device="cuda", dtype=source)
            for config in every(SINGLE, "float16"):
                wide, shifted = torch.cat((c, c), 1)[:, :n], torch.cat((c[:, :1], c), 1)[:, 1:]  # not aligned
                for given in (c, c.t().contiguous().t(), wide, shifted):
                    got = run(
                        a, b, config, torch.empty(m, n, dtype=out, device="cuda"), alpha=2.0**-12, beta=-2.0, c=given
                    )
                    assert_near(got, sums - 2 * c.double(), sums.abs().max())
                if source == out:
                    own = c.clone()
                    run(a, b, config, own, alpha=2.0**-12, beta=-2.0, c=own)
                    assert_near(own, sums - 2 * c.double(), sums.abs().max())


def test_operands_of_any_layout_are_the_same_matrix() -> None:
    m, k, n = 300, 520, 264
    a, b = ints(m, k, 1), ints(k, n, 2)
    expected = (a.double() @ b.double()).int()
    wide_a, wide_b = ints(m + 5, 2 * k + 40, 3), ints(2 * k + 3, n + 48, 4)
    lefts = {
        "rows": a, "columns": a.t().contiguous().t(), "slice of aligned rows": wide_a[2 : m + 2, 16 : k + 16].copy_(a),
        "unaligned start": wide_a[1 : m + 1, 17 + k : 2 * k + 17].copy_(a), "every second column": wide_a[:m, 1 : 2 * k : 2].copy_(a),
        "columns, unaligned": torch.empty(k, m + 7, dtype=torch.int8, device="cuda").t()[3 : m + 3].copy_(a),
    }  # fmt: skip
    rights = {
        "columns": b.t().contiguous().t(), "rows": b, "slice of rows": wide_b[1 : k + 1, 16 : n + 16].copy_(b),
        "unaligned rows": wide_b[k : 2 * k, 5 : n + 5].copy_(b), "every second row": wide_b[: 2 * k : 2, 40 : n + 40].copy_(b),
    }  # fmt: skip
    # The slices share memory: each is written anew before its turn.
    for left, x in lefts.items():
        for right, y in rights.items():
            x.copy_(a), y.copy_(b)
            assert torch.equal(gemm(x, y), expected), f"a: {left}, b: {right}"
    assert explain_gemm(lefts["rows"], rights["columns"]).copies == ("a0", "b0")  # 520 is no multiple of 16
    plan = explain_gemm(ints(m, 528, 1), ints(528, n, 2))
    assert plan.copies == ("b0",) and plan.workspace == n * 640  # rows at lines of 128 bytes
    mixed = gemm((a, lefts["columns"]), (rights["columns"], b), out_dtype=torch.float32)
    truth = total([a, a], [b, b], Products(2, 2, 2))
    assert_near(mixed, truth, truth.abs().max())


@pytest.mark.parametrize("config", [c for out in ("int64", "float32") for c in every(SINGLE, out, out)], ids=named)
def test_sums_beyond_int32_do_not_wrap(config: GemmConfig) -> None:
    dtype, n = getattr(torch, config.out), 72
    for k in (MAX_PRODUCTS, MAX_PRODUCTS + 1, 3 * MAX_PRODUCTS + 5):
        a, b = (
            torch.full((9, k), -128, dtype=torch.int8, device="cuda"),
            torch.full((k, n), -128, dtype=torch.int8, device="cuda"),
        )
        expected = torch.full((9, n), k * 2**14, device="cuda").to(dtype)
        assert torch.equal(run(a, b, config, torch.empty(9, n, dtype=dtype, device="cuda")), expected)
        if k > MAX_PRODUCTS:
            with pytest.raises(ValueError, match=f"K must be at most {MAX_PRODUCTS}"):
                gemm(a, b)
            half = gemm((a, a), (b, b), alpha=2.0**-33, bias=torch.ones(n, device="cuda"), out_dtype=torch.float16)
            assert torch.equal(half, torch.full_like(half, k * 2**14 * (1 + 2 / 256) * 2.0**-33 + 1))
            assert explain_gemm((a, a), (b, b), out_dtype=torch.float16).chunks == -(
                -k // (MAX_PRODUCTS // 2 // 128 * 128)
            )
        else:
            assert torch.equal(gemm(a, b), expected.int())


def test_runs_of_one_product_agree_in_every_bit() -> None:
    for terms, (m, k, n) in ((1, (4096, 2048, 4096)), (3, (2048, 1024, 2176)), (6, (1024, 1024, 1152))):
        count = {1: 1, 3: 2, 6: 3}[terms]
        a, b = tuple(ints(m, k, i) for i in range(count)), tuple(ints(n, k, 9 + i).t() for i in range(count))
        truth = total(list(a), list(b), select_products(count, count, terms))
        first = gemm(a, b, out_dtype=torch.float32)
        assert_near(first, truth, truth.abs().max())
        assert all(torch.equal(gemm(a, b, out_dtype=torch.float32), first) for _ in range(20))


def test_graphs_and_other_streams() -> None:
    a, b, out = ints(300, 512, 1), ints(512, 256, 2), torch.zeros(300, 256, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gemm(a, b, out=out)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, (a.double() @ b.double()).int())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, out=out)
    a.copy_(ints(300, 512, 7))
    out.zero_()
    graph.replay()
    assert torch.equal(out, (a.double() @ b.double()).int())


@pytest.mark.parametrize("config", every(SINGLE, "int8"), ids=named)
def test_each_kernel_ends_in_integers_by_a_scale(config: GemmConfig) -> None:
    scale = torch.tensor(0.02, device="cuda")
    for m, k, n in SHAPES:
        a, b = [ints(m, k, 1)], [ints(k, n, 2).t().contiguous().t()]
        rows, columns = torch.rand(m, device="cuda") / k**0.5 / 1e4, torch.rand(n, device="cuda")
        bias = torch.randn(n, device="cuda")
        exact = total(a, b, SINGLE) * rows.double()[:, None] * columns.double() + bias.double()
        for left, width in ((1, n + 3), (16, n + 16 + -n % 16)):  # rows of the output lie unaligned, and aligned
            around = torch.full((m + 2, left + width), 99, dtype=torch.int8, device="cuda")
            out = around[1 : m + 1, left : left + n]
            options = {"scale_a": rows, "scale_b": columns, "bias": bias, "out_scale": scale}
            run(a, b, config, out, **options, activation="gelu")
            near = out.double() - (torch.nn.functional.gelu(exact) / scale.double()).clamp(-128, 127)
            bound = 0.5 + 1e-3 + (2.0**-12 * exact.abs() + 4e-5) / float(scale)
            assert bool((near.abs() <= bound).all())
            around[1 : m + 1, left : left + n] = 99
            assert bool((around == 99).all())


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_an_activation_follows_the_sums(activation: str, out: torch.dtype) -> None:
    a, b = ints(300, 520, 1), ints(520, 144, 2)
    rows, bias = torch.rand(300, device="cuda") / 2e5, torch.randn(144, device="cuda")
    c = torch.randn(300, 144, device="cuda")
    options: dict[str, Any] = {"scale_a": rows, "bias": bias, "c": c, "beta": 0.5}
    plain = gemm(a, b, **options, out_dtype=torch.float32)
    want = activate(plain.double(), activation)
    got = gemm(a, b, **options, activation=activation, out_dtype=out)
    bound = 4e-7 * want.abs().clamp_min(1.0) + torch.finfo(out).eps * want.abs()
    assert bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.skipif(ARCH != "sm_90a", reason="needs an sm_90 GPU")
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("config", [each for each in candidates(SINGLE, "sm_90a") if each.tile_n % 64 == 0], ids=named)
def test_each_kernel_gates_its_results(config: GemmConfig, out: str) -> None:
    dtype, scale = getattr(torch, out), torch.tensor(0.02, device="cuda") if out == "int8" else None
    for m, k, n in ((1, 16, 64), (300, 520, 128), (257, 77, 1088), (64, 64, 4096), (2050, 2200, 832)):
        a, b = [ints(m, k, 1)], [ints(k, n, 2).t().contiguous().t()]
        rows, columns = torch.rand(m, device="cuda") / k**0.5 / 1e4, torch.rand(n, device="cuda")
        bias = torch.randn(n, device="cuda")
        exact = total(a, b, SINGLE) * rows.double()[:, None] * columns.double() + bias.double()
        gates, others = exact.tensor_split(2, dim=1)
        want, size = torch.nn.functional.silu(gates) * others, (gates * others).abs()
        around = torch.full((m + 2, n // 2 + 16), 99, dtype=dtype, device="cuda")
        got = around[1 : m + 1, 16:]
        options = {"scale_a": rows, "scale_b": columns, "bias": bias, "out_scale": scale}
        run(a, b, config, got, **options, activation="silu", glu=True)
        sums = 1e-6 * (size + gates.abs() + others.abs() + 1)  # of float32, each factor beside its bias
        if scale is None:
            near, bound = got.double() - want, sums + torch.finfo(dtype).eps * want.abs() + torch.finfo(dtype).tiny
        else:
            near = got.double() - (want / scale.double()).clamp(-128, 127)
            bound = 0.5 + (sums + 2.0**-12 * size + 4e-5 * others.abs()) / float(scale)
        assert bool((near.abs() <= bound).all())
        around[1 : m + 1, 16:] = 99
        assert bool((around == 99).all())


def test_parts_are_gated_by_torch_where_no_kernel_does() -> None:
    a, b, c = ints(70, 64, 1), ints(64, 96, 2), torch.zeros(70, 48, dtype=torch.bfloat16, device="cuda")
    for right in (b, b[:, :40]):  # 48 and 20 columns of the output
        y = gemm(a, right, alpha=1e-4, out_dtype=torch.float32)
        gates, others = y.tensor_split(2, dim=1)
        out = c[:, : gates.shape[1]]
        found = gemm(a, right, alpha=1e-4, activation="relu", glu=True, out=out, out_dtype=torch.bfloat16)
        assert found is out and torch.equal(out, (gates.relu() * others).bfloat16())
    with pytest.raises(
        ValueError, match="config must be of WGMMA and tiles of N a multiple of 64 for glu, got gemm-mma"
    ):
        gemm(a, b, glu=True, out_dtype=torch.float16, config=candidates(SINGLE, "sm_80")[0])


def test_only_the_last_part_of_a_long_sum_is_finished() -> None:
    k = 2 * MAX_PRODUCTS
    a, b = ints(32, k, 1), ints(k, 64, 2)
    scale = torch.tensor(0.05, device="cuda")
    exact = total([a], [b], SINGLE) / 1e6
    got = gemm(a, b, alpha=1e-6, activation="silu", out_scale=scale, out_dtype=torch.int8)
    near = got.double() - (torch.nn.functional.silu(exact) / scale.double()).clamp(-128, 127)
    assert bool((near.abs() <= 0.51 + 2.0**-12 * exact.abs() / float(scale)).all())


def test_products_of_nothing() -> None:
    empty = torch.zeros(5, 0, dtype=torch.int8, device="cuda")
    bias, c = torch.randn(7, device="cuda"), torch.randn(5, 7, device="cuda")
    assert torch.equal(gemm(empty, empty.t()[:, :3]), torch.zeros(5, 3, dtype=torch.int32, device="cuda"))
    got = gemm(
        empty, torch.zeros(0, 7, dtype=torch.int8, device="cuda"), bias=bias, beta=2.0, c=c, out_dtype=torch.float32
    )
    assert torch.equal(got, 2 * c + bias)
    assert gemm(empty.t()[:, :0], empty[:0]).shape == (0, 0)


def test_an_output_of_more_than_two_to_the_31_elements() -> None:
    m, k, n = 2**16 + 8, 64, 2**15 + 64
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of GPU memory")
    a, b = ints(m, k, 1), ints(k, n, 2)
    out = torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda")
    gemm(a, b, alpha=2.0**-8, out=out, out_dtype=torch.float16)
    rows = torch.tensor([0, 1, m // 2, 2**31 // n, 2**31 // n + 1, m - 1], device="cuda")
    assert torch.equal(out[rows], (a[rows].double() @ b.double() * 2.0**-8).half())
    assert not bool(torch.isnan(out.view(-1)[::4099]).any())


def test_the_plan_names_the_kernel_that_runs() -> None:
    plan = explain_gemm(ints(512, 512, 1), ints(512, 512, 2).t())
    assert plan.config is not None and plan.kernel == plan.config.name
    kernel = get_kernel(plan.config)
    assert kernel.local_bytes == 0 and plan.copies == () and plan.workspace == 0


def test_arguments_of_the_gpu_are_checked() -> None:
    a, b = ints(4, 4, 1), ints(4, 4, 2)
    with pytest.raises(ValueError, match="scale_a must be on cuda:0 as a is, got cpu"):
        gemm(a, b, scale_a=torch.ones(4), out_dtype=torch.float32)
    with pytest.raises(TypeError, match=r"out_dtype on cuda:0 must be one of .* got torch.float64"):
        gemm(a, b, out_dtype=torch.float64)


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 16, 4), (7, 33, 64), (300, 513, 260), (1000, 4096, 2048), (129, 131071, 8)]
)
def test_the_kernels_of_cutlass_are_exact(m: int, k: int, n: int) -> None:
    pytest.importorskip("cutlass_library")
    a, b = ints(m, k, 1), ints(k, n, 2)
    expected = (a.double() @ b.double()).int()
    assert torch.equal(gemm(a, b, backend="cutlass"), expected)
    wide = torch.zeros(m, n + 8, dtype=torch.int32, device="cuda")
    gemm(a, b.t().contiguous().t(), out=wide[:, :n], backend="cutlass")
    assert torch.equal(wide[:, :n], expected) and not bool(wide[:, n:].any())
    with pytest.raises(ValueError, match=r"N a multiple of 4, got 'cutlass' for torch.int32 and N = 3"):
        gemm(a, b[:, :3], backend="cutlass")


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (7, 33, 65), (130, 513, 257), (300, 4096, 520)])
def test_packed_integers_are_multiplied_exactly(m: int, k: int, n: int) -> None:
    a, b = ints(m, k, 1) >> 4, ints(k, n, 2) >> 4
    left, right, expected = Int4Matrix.from_ints(a, 1), Int4Matrix.from_ints(b, 0), (a.double() @ b.double()).int()
    for x, y in ((left, right), (left, b), (a, right)):
        assert torch.equal(gemm(x, y), expected)
    if torch.cuda.get_device_capability()[0] != 8:
        with pytest.raises(ValueError, match="config must be of instructions of sm_"):
            gemm(left, right, config=NATIVE_INT4)
        return
    assert torch.equal(gemm(left, right, config=NATIVE_INT4), expected)
    scale = torch.rand(n, device="cuda")
    got = gemm(left, right, config=NATIVE_INT4, scale_b=scale, out_dtype=torch.float32)
    assert torch.equal(got, expected.float() * scale)


def test_a_call_like_an_earlier_one_reads_what_is_there_now() -> None:
    a, b = ints(64, 128, 1), ints(96, 128, 2).t()
    out, scale = torch.empty(64, 96, device="cuda"), torch.rand(96, device="cuda")
    for number in range(4):
        a.fill_(number).add_(ints(64, 128, 3) // 2)
        scale.fill_(1.0 + number)
        gemm(a, b, scale_b=scale, out=out, out_dtype=torch.float32)
        assert torch.equal(out, (a.double() @ b.double()).float() * scale)
