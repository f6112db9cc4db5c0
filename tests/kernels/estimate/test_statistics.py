"""Statistics of operands for a GPU, looked at without one: machine code, layout of the numbers, and what is launched."""

from __future__ import annotations

import re
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.estimate import probes, statistics
from cute_kernels.estimate.statistics import SlicedOperand, StatisticsConfig, StatisticsRule
from cute_kernels.jit import Binary
from residual.cuda.operand import FAR, HOT, MOST_HOT, SAMPLE
from tests.helpers import lean_sass

pytest.importorskip("cuda.core")

RULE = StatisticsRule(8, (8, 24, 64), (1 / 16, 1 / 8, 1 / 4, 1 / 2), 30, 16, 16)
KERNELS = [StatisticsConfig("sample_lines"), StatisticsConfig("measure_lines"), StatisticsConfig("meet_lines")]
CASES = [*((config, arch) for config in KERNELS for arch in ("sm_80", "sm_90a"))]
CASES.append((StatisticsConfig("sample_lines", "bfloat16"), "sm_90a"))
# Slow paths of divisions, roots and reciprocals, and of shuffles and sums of a diverged warp.
_SELDOM = r"\$__internal_\d+_\$__cuda_(?:sm\d\w*_(?:div|rcp|dsqrt|dblrcp|warpsync|shflsync)|redux)\w*|\.L_x_\d+"


@pytest.mark.parametrize(("config", "arch"), CASES, ids=[f"{arch}-{config.name}" for config, arch in CASES])
def test_kernels_spill_nothing_and_call_nothing_often(
    config: StatisticsConfig, arch: str, binaries: dict[tuple[StatisticsConfig, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = lean_sass(binary, _SELDOM)
    assert "REDUX" in sass and "ATOMS" not in sass  # no sum hangs on the order in which threads arrive
    counters = re.findall(r"\b(?:RED|ATOM)G?\.E\S*", sass)
    assert bool(counters) == (config.kernel == "meet_lines"), counters
    assert all(".ADD" in counter and "F32" not in counter and "F64" not in counter for counter in counters), counters


def test_the_rules_are_those_of_the_operands() -> None:
    defaults = StatisticsConfig("meet_lines")
    assert (defaults.range_log2, defaults.outlier_ratio, defaults.outlier_divisor) == (FAR, HOT, MOST_HOT)
    assert statistics.NUM_SLICES == SAMPLE


def test_numbers_are_taken_apart_in_the_order_of_the_kernel() -> None:
    numbers = [float(i) for i in range(statistics._NUMBERS)]
    found = statistics.parse_statistics(numbers)
    assert (found.sum_of_squares[0], found.sum_of_squares[48], found.raw[0], found.raw[24]) == (0, 48, 49, 73)
    assert (found.num_outliers, found.product, found.cross_energy_by_share) == (74, 75, [76, 77, 78, 79])
    assert (found.lhs_means[0], found.lhs_means[99], found.rhs_means[0], found.rhs_means[99]) == (80, 179, 180, 279)
    assert found.density == ([280, 281, 282], [283, 284, 285])
    assert found.norms == (286, 288) and found.out_of_range == 287 + 289


@pytest.mark.parametrize("inner", [1, 63, 64, 65, 4096, 2**15])
def test_a_workspace_holds_facts_forms_energies_and_lines(inner: int) -> None:
    pitch = statistics.row_pitch(inner)
    assert pitch >= inner and pitch % statistics.CHUNK == 0 and pitch - inner < statistics.CHUNK
    floats = 2 * statistics.FACTS + statistics.NUM_SLICES * statistics.FORMS + pitch + statistics.NUM_SLICES * pitch
    size = statistics.workspace_size(inner)
    assert 8 * size == 4 * floats + pitch
    side = statistics.OperandSample(torch.zeros(size, dtype=torch.float64), inner)
    start, hot = side.addresses()
    assert hot - start == 4 * floats and side.outliers.data_ptr() == hot and side.outliers.shape == (inner,)
    assert (
        statistics.supports_statistics(1, inner)
        and not statistics.supports_statistics(1, 2**15 + 1)
        and not statistics.supports_statistics(0, inner)
    )


class Dispatched(TorchDispatchMode):
    """Names of torch's operators that would launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith("empty") and name != "detach":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Recorded:
    """A kernel that only notes its launches."""

    launches: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]]

    num_sms = 132

    def __init__(self, config: Any) -> None:
        self.name = config.kernel

    def launch(self, grid: tuple[int, int, int], args: tuple[Any, ...], pdl: bool = False) -> None:
        self.launches.append((self.name, grid, args))


class Passed:
    """An event that nothing waits for."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, int, int], tuple[Any, ...]]]:
    make = torch.empty
    Recorded.launches = []

    def pageable(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*size, **options)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.cuda, "Event", Passed)
    monkeypatch.setattr(probes, "readable", lambda x: x.stride(1) == 1)
    monkeypatch.setattr(probes, "num_sms", lambda device: 132)
    for module in (statistics, probes):
        monkeypatch.setattr(module, "get_kernel", Recorded)
        monkeypatch.setattr(module, "device_of", lambda x: nullcontext())
    return Recorded.launches


def test_statistics_are_two_passes_with_probes_three_launches_and_a_copy(
    recorded: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]],
) -> None:
    A, B = torch.rand(100, 300), torch.rand(300, 200)
    with Dispatched() as torchs:
        inner, columns = probes.probe_with_absmax(B, torch.zeros(16, 224), "columns")
        product, rows = probes.probe_with_absmax(A, inner, "rows")
        found = statistics.start_statistics(
            SlicedOperand(A, rows), SlicedOperand(B.mT, columns), product, RULE, seed=2**64 - 1
        )
        again = statistics.start_statistics(
            SlicedOperand(A.half(), rows.clone()), found.samples[1], product, RULE, seed=-5
        )
    names = [name for name, _, _ in recorded]
    assert names[:5] == ["probe", "probe", "sample_lines", "measure_lines", "meet_lines"]
    assert names[5:] == names[2:5]
    assert [grid for _, grid, _ in recorded[2:]] == [(5, 2, 1), (16, 2, 1), (5, 1, 1), (5, 1, 1), (16, 1, 1), (5, 1, 1)]
    wanted = {"zeros": 2, "copy_": 2, "clone": 1, "_to_copy": 1}  # the last two are this test's own
    assert {name: torchs.names.count(name) for name in set(torchs.names)} == wanted
    assert again.samples[1] is found.samples[1] and found.cross_weight.shape == (300,)
    sample = recorded[2][2]
    assert sample[1:3] == (300, 1) and sample[8:10] == (1, 200)  # steps from line to line and along k, of A and of B
    assert sample[4] == 100 and sample[11] == 200 and sample[5] != sample[12]
    assert all(-(2**63) <= value < 2**63 for _, _, args in recorded for value in args)
    assert recorded[4][2][15:19] == (19, 38, 75, 150)  # of 300 columns of k


def test_a_pass_over_a_short_transposed_operand_is_shared_among_blocks(
    recorded: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]],
) -> None:
    x = torch.rand(4096, 300).mT
    y, tops = probes.probe_with_absmax(x, torch.zeros(16, 4096), "columns")
    assert y.shape == (16, 320) and tops.shape == (4096,)
    ((name, grid, arguments),) = recorded
    assert (name, grid) == ("probe_transposed", (10, 8, 1))  # 32 columns of X^T a block, 512 rows at least
    assert arguments[:5] == (x.data_ptr(), 300, 300, 4096, 1)


def test_different_dtypes_are_drawn_by_a_kernel_each(
    recorded: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]],
) -> None:
    A, B = torch.rand(20, 64), torch.rand(64, 30).half()
    statistics.start_statistics(
        SlicedOperand(A, A.amax(1)), SlicedOperand(B.mT, B.float().amax(0)), torch.zeros(16, 32), RULE, seed=0
    )
    assert [name for name, _, _ in recorded] == ["sample_lines", "sample_lines", "measure_lines", "meet_lines"]
    assert recorded[0][2][0] == A.data_ptr() and recorded[1][2][0] == B.data_ptr()


@pytest.mark.parametrize(
    ("rows", "groups"), [(100, 1), (2048, 1), (4096, 1), (8192, 2), (8448, 2), (8449, 1), (50_000, 2)]
)
def test_two_groups_share_a_block_where_blocks_fill_the_gpu_as_well(
    rows: int, groups: int, recorded: list[tuple[str, tuple[int, int, int], tuple[Any, ...]]]
) -> None:
    probes.probe(torch.zeros(rows, 4), torch.zeros(16, 32))
    assert recorded[0][1] == (-(-rows // (32 * groups)), 1, 1)
