"""The choice of a kernel: pure, from numbers alone; what it may never choose and what it should."""

from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("pycute")

from cute_kernels.dtypes import Integer
from cute_kernels.machine import SAFE_RUN, SHARED_BYTES, Machine, Problem, ProblemTypes
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.heuristics import choose_sddmm
from cute_kernels.sddmm.panel import SddmmPanelConfig
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import candidates, check_spmm, choose_spmm, reason, spmm_cost
from cute_kernels.spmm.panel import PanelConfig
from magicube_cutlass.dispatch.dense_fallback import Forecast, copy_cost, dense_cost

H200, A100 = Machine("sm_90a", 132), Machine("sm_80", 108)
L8R8, OUT = ProblemTypes(8, Integer(8, True), Integer(8, True), "float16"), "float16"


def test_many_long_vector_rows_share_panels_and_few_do_not() -> None:
    large = choose_spmm(L8R8, H200, Problem(512, 4096, 512 * 410, 460, 4096))
    small = choose_spmm(L8R8, H200, Problem(32, 2304, 32 * 230, 280, 512))
    assert isinstance(large, PanelConfig)
    assert isinstance(small, GatherConfig)
    assert small.split_k_warps > 1
    assert "share tiles" in reason(large, 512, 512 * 410, 460)
    assert "too few" in reason(small, 32, 32 * 230, 280)


def test_a_vector_row_twice_as_long_as_the_mean_leaves_the_panel_kernel() -> None:
    """256 x 2304 of a pruned ResNet-50: one warp of a panel would multiply 469 of 7,427 vectors."""
    pruned = Problem(32, 2304, 7427, 469, 512)
    config = choose_spmm(L8R8, H200, pruned)
    assert isinstance(config, GatherConfig) and config.split_k_warps > 1
    panels = [each for each in candidates(L8R8, H200, pruned) if isinstance(each, PanelConfig)]
    for panel in panels:
        even, long = (spmm_cost(panel, H200, replace(pruned, longest=longest)) for longest in (232, 469))
        assert 1000 < long - even < 1200  # 6 groups of 32 vectors beyond a mean row, at 200 ns


def test_a_matrix_that_is_used_once_gets_no_panel() -> None:
    problem = Problem(512, 4096, 512 * 410, 460, 4096)
    config = choose_spmm(L8R8, H200, problem, single_use=True)
    assert isinstance(config, GatherConfig) and isinstance(choose_spmm(L8R8, H200, problem), PanelConfig)
    text = reason(config, problem.vector_rows, problem.vectors, problem.longest, single_use=True)
    assert "used once" in text and "too few" not in text


@pytest.mark.parametrize("out", ["float16", "float32"])
@pytest.mark.parametrize("n", [16, 64, 512, 513, 1024, 4096])
def test_a_transpose_of_many_columns_is_written_by_pairs_of_vector_rows(out: str, n: int) -> None:
    kind, problem = replace(L8R8, out=out), Problem(512, 4096, 512 * 410, 460, n)
    config = choose_spmm(kind, H200, problem, transposes=True)
    if n > 512 and out == "float32":
        assert config == choose_spmm(kind, H200, problem)  # another launch transposes
    else:
        assert config.transposed and (n <= 512 or (isinstance(config, PanelConfig) and config.pairs))
    alone = choose_spmm(L8R8, H200, problem, single_use=True, transposes=True)
    assert isinstance(alone, GatherConfig) and alone.transposed == (n <= 512)


def test_four_vector_rows_a_warp_are_for_transposes_that_have_the_registers() -> None:
    """65.8 us at 4096^3, 0.9, where 14 warps of 2 take 70.7 and 15 of 2 73.1 (H100, behind another kernel)."""
    problem = Problem(512, 4096, 512 * 410, 460, 4096)
    config = choose_spmm(L8R8, H200, problem, transposes=True)
    assert isinstance(config, PanelConfig) and (config.warps, config.rows_per_warp) == (11, 4)
    for kind in (replace(L8R8, rhs=Integer(4, True)), replace(L8R8, lhs=Integer(16, True))):
        config = choose_spmm(kind, H200, problem, transposes=True)
        assert isinstance(config, PanelConfig) and config.pairs and config.rows_per_warp < 4


@pytest.mark.parametrize(("rows", "inner", "mean", "n"), [(128, 1024, 51, 1024), (48, 1536, 70, 4096)])
def test_the_launch_that_transposes_counts(rows: int, inner: int, mean: int, n: int) -> None:
    """1,024^3 at 0.8: 8.4 us by the gather kernel and that launch, 5.5 by a panel kernel that writes rows (H200)."""
    longest = round(mean + 3 * mean**0.5)
    assert choose_spmm(L8R8, H200, Problem(rows, inner, rows * mean, longest, n), transposes=True).transposed


@pytest.mark.parametrize(("rows", "n", "warps"), [(128, 128, 4), (256, 128, 4), (512, 128, 8), (512, 256, 8)])
def test_few_ctas_are_of_four_warps_and_many_of_eight(rows: int, n: int, warps: int) -> None:
    """Up to an SM each, four warps are 7% faster, for twice as many SMs work; eight start sooner (H200)."""
    config = choose_spmm(L8R8, H200, Problem(rows, 512, rows * 15, 27, n))
    assert isinstance(config, GatherConfig) and config.split_k_warps == 1 and config.warps == warps


def test_the_chosen_panel_wastes_no_wave() -> None:
    config = choose_spmm(L8R8, H200, Problem(512, 4096, 512 * 410, 460, 512))
    assert isinstance(config, PanelConfig)
    assert 0.9 * 132 <= config.items(512, 512, 1) <= 132


@pytest.mark.parametrize(
    ("bits", "n", "row"), [(8, 16, 16), (8, 24, 32), (8, 64, 64), (4, 16, 16), (16, 16, 32), (16, 8, 32), (8, 96, 0)]
)
def test_rows_of_few_columns_are_as_long_as_they_are(bits: int, n: int, row: int) -> None:
    kind = replace(L8R8, rhs=Integer(bits, True))
    found = candidates(kind, H200, Problem(1792, 4096, 1792 * 410, 460, n))
    panels = [config for config in found if isinstance(config, PanelConfig)]
    assert len({config.name for config in found}) == len(found) and len(panels) >= 10 and len(panels) < len(found)
    assert {config.tile_n_bytes for config in found} == ({row} if row else {64, 128})
    assert not row or all(config.a_stages >= 3 for config in panels)
    assert all(config.smem_bytes <= SHARED_BYTES for config in panels)
    assert {config.tile_n_bytes for config in candidates(kind, A100, Problem(64, 4096, 64 * 410, 460, n))} == (
        {row} if row else {64, 128}
    )


def test_groups_of_sixteen_take_rows_of_two_pieces() -> None:
    found = candidates(L8R8, H200, Problem(1792, 4096, 1792 * 410, 460, 16), "s8_m16n8k16")
    assert {config.tile_n_bytes for config in found} == {32} and {config.mma_k for config in found} == {16}


def test_records_come_from_far_ahead_where_they_are_waited_for() -> None:
    for left, right, warps in ((8, 8, {7, 8}), (16, 8, {7, 8, 11, 13, 14, 15}), (8, 4, set())):
        kind = replace(L8R8, lhs=Integer(left, True), rhs=Integer(right, True))
        panels = [
            c for c in candidates(kind, H200, Problem(512, 4096, 512 * 410, 460, 4096)) if isinstance(c, PanelConfig)
        ]
        assert {c.warps for c in panels if c.a_stages and c.tile_n_bytes == 128} <= warps | {16}
        assert warps & {c.warps for c in panels if c.a_stages and c.tile_n_bytes == 128} or not warps


def test_chips_without_tensor_copies_get_no_panel() -> None:
    for machine in (A100, Machine("sm_89", 142), Machine("sm_120a", 170), Machine("compute_80", 132)):
        assert isinstance(choose_spmm(L8R8, machine, Problem(512, 4096, 512 * 410, 460, 4096)), GatherConfig)


@pytest.mark.parametrize("out", ["int32", "int64", "float16"])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (16, 16)])
def test_rows_that_outgrow_32_bits_are_summed_wide(out: str, bits: tuple[int, int]) -> None:
    kind = ProblemTypes(8, Integer(bits[0], True), Integer(bits[1], True), out)
    config = choose_spmm(kind, H200, Problem(512, 10**6, 512 * SAFE_RUN, SAFE_RUN + 1, 512))
    wide = isinstance(config, GatherConfig) and config.int64_accum
    assert wide == (out != "int32" or bits == (4, 4))


def test_four_bit_operands_use_the_native_instruction_only_where_there_is_one() -> None:
    kind, problem = ProblemTypes(8, Integer(4, True), Integer(4, True), "int32"), Problem(64, 1024, 6400, 120, 256)
    assert choose_spmm(kind, A100, problem).atom == "s4_m16n8k64"
    assert choose_spmm(kind, H200, problem).atom == "int4_as_int8_m16n8k32"
    assert choose_sddmm(kind, A100, stride=32, inner=64).atom == "s4_m16n8k64"
    assert choose_spmm(kind, H200, problem, "s8_m16n8k16").atom == "s8_m16n8k16"


@pytest.mark.parametrize("problem", [
    Problem(0, 12, 0, 0, 16), Problem(0, 0, 0, 0, 1, 2), Problem(4, 0, 0, 0, 16), Problem(4, 12, 0, 0, 1), Problem(1, 1, 1, 1, 1)
])  # fmt: skip
def test_there_is_a_kernel_for_nothing_too(problem: Problem) -> None:
    for machine in (H200, A100):
        assert isinstance(choose_spmm(L8R8, machine, problem), GatherConfig)


def test_a_config_for_other_operands_is_refused() -> None:
    config = choose_spmm(L8R8, H200, Problem(512, 4096, 512 * 410, 460, 512))
    with pytest.raises(ValueError, match="config must be for ProblemTypes"):
        check_spmm(config, ProblemTypes(4, Integer(8, True), Integer(8, True), "float16"), 460)
    # the largest product of unsigned digits, and two of mixed signs that share a sum
    assert SAFE_RUN * 255 * 255 < 2**31 and SAFE_RUN * 2 * 255 * 128 < 2**31
    with pytest.raises(ValueError, match=f"must have int64_accum=True for a vector row of {SAFE_RUN + 1}"):
        check_spmm(config, L8R8, SAFE_RUN + 1)


def test_names_tell_configs_apart() -> None:
    outs, kinds = ("int32", "float16"), [(8, True), (8, False), (16, True), (4, True)]
    problems = [Problem(r, 4096, r * longest, longest, n, b)
                for r in (8, 512) for longest in (40, 400, 40000) for n in (64, 4096) for b in (1, 2)]  # fmt: skip
    chosen = {
        choose_spmm(ProblemTypes(v, Integer(*a), Integer(*b), out), machine, problem)
        for v in (1, 8, 32) for a in kinds for b in kinds for out in outs for machine in (H200, A100)
        for problem in problems
    }  # fmt: skip
    assert len({config.name for config in chosen}) == len(chosen)


def test_a_request_that_no_kernel_supports_raises() -> None:
    problem = Problem(512, 4096, 512 * 410, 460, 512)
    for choose in (
        lambda machine, atom: choose_spmm(L8R8, machine, problem, atom),
        lambda machine, atom: choose_sddmm(L8R8, machine, stride=32, inner=64, atom=atom),
    ):
        with pytest.raises(
            ValueError, match="atom must be an instruction of a warp, 32 threads, got s8_m64n8k32 of 128"
        ):
            choose(H200, "s8_m64n8k32")
        with pytest.raises(ValueError, match="atom must be an instruction of sm_90a, got s4_m16n8k64 of sm_80"):
            choose(H200, "s4_m16n8k64")
    with pytest.raises(ValueError, match="atom must be an instruction of a warp"):
        check_spmm(GatherConfig("s8_m64n8k32", 8, Integer(8, True), Integer(8, True), "float16"), L8R8, 460)


def sample(kind: ProblemTypes, sizes: tuple[int, int, int], sparsity: float, machine: Machine = H200, stride: int = 32):  # type: ignore[no-untyped-def]
    """What ``sddmm`` chooses for X and Y of (M, N, inner) at a uniform pattern."""
    m, n, inner = sizes
    rows = -(-m // kind.vector_length)
    vectors = round(rows * n * (1 - sparsity))
    return choose_sddmm(kind, machine, stride=stride, inner=inner, vector_rows=rows, vectors=vectors, columns=n)


@pytest.mark.parametrize(
    ("sizes", "sparsity", "panel"),
    [
        ((4096, 4096, 256), 0.9, True),
        ((4096, 4096, 128), 0.9, True),
        ((4096, 4096, 512), 0.9, True),
        ((4096, 4096, 64), 0.9, True),
        ((4096, 4096, 256), 0.7, True),
        ((2048, 2048, 256), 0.9, True),
        ((8192, 8192, 256), 0.95, True),
        ((4096, 4096, 256), 0.98, False),
        ((1024, 1024, 256), 0.9, False),
        ((512, 2304, 256), 0.9, False),
    ],
)
def test_samples_share_panels_where_these_were_measured_to_be_faster(
    sizes: tuple[int, int, int], sparsity: float, panel: bool
) -> None:
    assert isinstance(sample(L8R8, sizes, sparsity), SddmmPanelConfig) == panel


def test_a_panel_for_samples_holds_all_of_k_and_fits_a_multiprocessor() -> None:
    seen = set()
    widths = [(bits, True) for bits in (4, 8, 12, 16)]
    for v, left, right, stride in product((1, 2, 4, 8, 16, 32), widths, widths, (16, 32, 64)):
        for inner in (16, 64, 128, 256, 512, 1024, 4096):
            config = sample(
                ProblemTypes(v, Integer(*left), Integer(*right), "float16"), (512 * v, 4096, inner), 0.8, stride=stride
            )
            seen.add(type(config))
            if isinstance(config, SddmmPanelConfig):
                assert config.depth >= inner and config.smem_bytes <= 227 * 1024 and stride % config.slots == 0
                assert config.registers <= 48  # of which the machine code is known to spill nothing
    assert seen == {SddmmPanelConfig, SddmmConfig}


def test_no_panel_for_samples_without_tensor_copies_or_a_pattern_or_with_4_bit_instructions() -> None:
    sizes = (4096, 4096, 256)
    for machine in (A100, Machine("sm_89", 142), Machine("sm_120a", 170), Machine("compute_80", 132)):
        assert isinstance(sample(L8R8, sizes, 0.9, machine), SddmmConfig)
    assert isinstance(sample(L8R8, (4096, 4096, 1024), 0.9), SddmmConfig)  # does not fit
    assert isinstance(sample(L8R8, sizes, 1.0), SddmmConfig)
    assert isinstance(sample(L8R8, (2**20, 2**15, 256), 0.5), SddmmConfig)  # more places than 32 bits count
    assert isinstance(choose_sddmm(L8R8, H200, stride=32, inner=256), SddmmConfig)
    long = sample(ProblemTypes(8, Integer(8, True), Integer(8, True), "int64"), (4096, 4096, 2 * SAFE_RUN), 0.9)
    assert isinstance(long, SddmmConfig) and long.int64_accum


def test_the_cost_of_a_product_grows_with_its_work() -> None:
    for kind, machine in (
        (L8R8, H200),
        (ProblemTypes(4, Integer(16, True), Integer(8, True), "int32"), H200),
        (L8R8, A100),
    ):
        for rows, n in ((32, 128), (512, 512), (512, 4096)):
            costs = []
            for mean in (64, 512, 2048):
                problem = Problem(rows, 4096, rows * mean, mean, n)
                costs.append(spmm_cost(choose_spmm(kind, machine, problem), machine, problem))
            assert costs == sorted(costs) and costs[0] < costs[-1]
            problem = Problem(rows, 4096, rows * 512, 512, n)
            twice = Problem(rows, 4096, rows * 512, 512, 2 * n)
            config = choose_spmm(kind, machine, problem)
            assert spmm_cost(config, machine, problem) <= spmm_cost(config, machine, twice)
            assert dense_cost(machine, 8 * rows, problem, OUT) <= dense_cost(machine, 16 * rows, twice, OUT)


@pytest.mark.parametrize(
    ("sizes", "sparsity", "wins"),
    [
        ((4096, 4096, 512), 0.5, True),
        ((4096, 4096, 512), 0.95, False),
        ((4096, 4096, 4096), 0.5, True),
        ((4096, 4096, 4096), 0.95, False),
        ((256, 2304, 512), 0.98, False),
    ],
)
def test_the_dense_product_wins_where_it_was_measured_to(
    sizes: tuple[int, int, int], sparsity: float, wins: bool
) -> None:
    m, k, n = sizes
    mean = round((1 - sparsity) * k)
    problem = Problem(m // 8, k, m // 8 * mean, mean, n)
    config = choose_spmm(L8R8, H200, problem)
    forecast = Forecast(spmm_cost(config, H200, problem), dense_cost(H200, m, problem, OUT))
    assert forecast.dense_wins == wins
    assert str(forecast).startswith(f"dense would {'' if wins else 'not '}be faster: about ")


def test_the_dense_product_pays_for_whole_tiles_and_for_each_matrix_of_a_batch() -> None:
    problem = Problem(512, 4096, 512 * 410, 460, 512)
    alone = dense_cost(H200, 4096, problem, OUT)
    assert 0.1 * alone < copy_cost(4096 * 512) < alone
    assert dense_cost(H200, 4096, replace(problem, batch=3), OUT) == pytest.approx(3 * alone)
    assert dense_cost(H200, 4096, replace(problem, n=449), OUT) == dense_cost(H200, 4096, replace(problem, n=512), OUT)
    assert 90e3 < dense_cost(H200, 4096, replace(problem, n=4096), OUT) < 115e3  # CUTLASS takes 96 us
