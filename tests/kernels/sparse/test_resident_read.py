"""What the warps of the SpMM resident kernel do with the records of a matrix, simulated on the host lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.cpu.engine import DenseOperand
from cute_kernels.dtypes import Integer
from cute_kernels.jit.cache import key
from cute_kernels.layout.bank_conflicts import swizzled
from cute_kernels.machine import SHARED_BYTES, Machine, Problem, ProblemTypes
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg, Vectors
from cute_kernels.spmm.heuristics import choose_spmm, reason
from cute_kernels.spmm.resident import PackedResident, ResidentConfig
from magicube_cutlass.dispatch import cuda as gpu
from tests.helpers import random_mask
from tests.kernels.sparse.test_panel_read import product_of

Array = np.ndarray[Any, Any]


def config_of(bits: int = 8, v: int = 8, **options: Any) -> ResidentConfig:
    small = {"tile": 64, "block_rows": 3, "warps": 4} | options
    return ResidentConfig("s8_m16n8k32", v, Integer(bits, True), Integer(8, True), "int32", **small)


def vectors_of(mask: torch.Tensor, bits: int = 8, v: int = 8, seed: int = 0) -> Vectors:
    columns, offsets = mask.nonzero()[:, 1].to(torch.int32), torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    top = 1 << bits - 1
    values = np.random.default_rng(seed).integers(-top, top, (len(columns), v))
    return Vectors(offsets, columns, torch.from_numpy(values).to(torch.int8), Integer(bits, True))


def held_rows(config: ResidentConfig, dense: Array, rank: int) -> Array:
    """Shared memory of a CTA that holds its rows of ``dense``, (K, tile_n_bytes)."""
    memory = np.zeros(config.tile * config.tile_n_bytes, dtype=np.uint8)
    for k, row in enumerate(dense[rank * config.tile : (rank + 1) * config.tile]):
        for unit in range(config.tile_n_bytes // 16):
            at = int(swizzled(k, unit, config.tile_n_bytes, config.swizzle))
            memory[at : at + 16] = row.view(np.uint8)[16 * unit : 16 * unit + 16]
    return memory


def records_of(config: ResidentConfig, copy: PackedResident, cta: int) -> Array:
    """The records of a CTA, without the padding behind those of its warps, in order."""
    total, found = int(copy.starts[cta, -1]), []
    for warp in range(config.warps):
        count = total * (warp + 1) // config.warps - total * warp // config.warps
        mine = copy.records[cta * config.warps + warp]
        assert not mine[count:].any()
        found.append(mine[:count])
    return torch.cat(found).numpy()


@pytest.mark.parametrize(("tile_n_bytes", "cluster"), [(16, 1), (16, 2), (32, 3)])
@pytest.mark.parametrize(("bits", "v"), [(8, 8), (4, 8), pytest.param(8, 4, marks=pytest.mark.long)])
@pytest.mark.parametrize("uneven", [False, True])
def test_the_warps_multiply_all_vector_rows(tile_n_bytes: int, cluster: int, bits: int, v: int, uneven: bool) -> None:
    inner = cluster * 64 - 5
    config = config_of(bits, v, tile_n_bytes=tile_n_bytes, cluster=cluster)
    mask, rows = random_mask(10, inner, 0.4, 3), 10 if uneven else 12
    mask[7], mask[3:] = False, mask[3:] & random_mask(7, inner, 0.1, 4)
    if not uneven:  # as many vectors in each vector row
        mask = torch.rand(12, inner, generator=torch.Generator().manual_seed(1)).argsort(1) < 30
    vectors = vectors_of(mask, bits, v)
    copy = config.pack(vectors, inner)
    order = copy.order.tolist() or list(range(12))
    assert bool(copy.order.numel()) is uneven and sorted(order)[:rows] == list(range(rows))
    dense = np.random.default_rng(7).integers(-128, 128, (inner, tile_n_bytes)).astype(np.int8)
    total = np.zeros((12, v, tile_n_bytes), dtype=np.int64)
    for cta, starts in enumerate(copy.starts.tolist()):
        block, rank = divmod(cta, cluster)
        memory, records = held_rows(config, dense, rank), records_of(config, copy, cta)
        for row in range(config.block_rows):
            sums, _ = product_of(config, records[starts[row] : starts[row + 1]], memory)
            total[min(order[block * config.block_rows + row], 11)] += sums
    kept = np.zeros((12, v, inner), dtype=np.int64)
    kept[mask.nonzero()[:, 0].numpy(), :, vectors.columns.numpy()] = vectors.values.numpy()
    np.testing.assert_array_equal(total, (16 if config.packed else 1) * (kept @ dense.astype(np.int64)))


def test_ctas_of_any_totals_have_their_records_where_the_kernel_looks() -> None:
    """Vector rows of 1 to 640 vectors, a CTA each, whose warps have as many records as those of the longest one."""
    lengths = [640, 128, 3, 256, 0, 65, 384, 1]
    mask = torch.arange(640) < torch.tensor(lengths)[:, None]
    config, vectors = config_of(tile=640, block_rows=1), vectors_of(mask)
    copy = config.pack(vectors, 640)
    assert copy.starts[:, 1].tolist() == [-(-each // 32) for each in lengths] and copy.records.shape[1] == 5
    dense = np.random.default_rng(3).integers(-128, 128, (640, 16)).astype(np.int8)
    for row, length in enumerate(lengths):
        sums, _ = product_of(config, records_of(config, copy, row), held_rows(config, dense, 0))
        first = int(vectors.row_offsets[row])
        values = vectors.values[first : first + length].numpy().astype(np.int64)
        np.testing.assert_array_equal(sums, values.T @ dense[:length].astype(np.int64))


def test_shares_are_equal_whatever_the_lengths() -> None:
    """One vector row of 960 vectors among 31 of about 10: every warp of its CTA has as many records."""
    mask = random_mask(32, 960, 0.01, 5)
    mask[7] = True
    config = config_of(tile=960, block_rows=8, warps=4)
    copy = config.pack(vectors_of(mask), 960)
    totals = copy.starts[:, -1]
    assert copy.records.shape[1] == -(-int(totals.max()) // 4) and int(totals.max()) <= 30 + 7
    assert int(totals.sum()) == int(((mask.sum(1) + 31) // 32).sum())


def test_no_vectors_and_no_vector_rows() -> None:
    for rows in (0, 5):
        copy = config_of().pack(vectors_of(torch.zeros(rows, 60, dtype=torch.bool)), 60)
        assert copy.records.numel() == 0 and not copy.starts.any() and len(copy.starts) == -(-rows // 3)


def test_one_kernel_serves_all_sizes() -> None:
    one, other = config_of(tile=64, block_rows=3), config_of(tile=4096, block_rows=14)
    assert one.name != other.name and key(one.translation_unit("sm_90a")) == key(other.translation_unit("sm_90a"))


def test_what_a_config_cannot_hold_is_refused() -> None:
    mask = random_mask(4, 129, 0.5, 1)
    with pytest.raises(ValueError, match="config must hold all 129 rows of B, got 2 CTAs of 64 rows"):
        config_of(cluster=2).pack(vectors_of(mask), 129)
    with pytest.raises(ValueError, match="config must have fewer than 128 block_rows, got 128"):
        config_of(block_rows=128, tile=256).pack(vectors_of(mask), 129)


def chosen(n: int, inner: int = 4096, arch: str = "sm_90a", right: int = 8, **options: Any) -> Any:
    kind = ProblemTypes(8, Integer(4, True), Integer(right, True), "bfloat16")
    problem = Problem(1792, inner, 1792 * inner // 2, inner // 2 + 100, n)
    return choose_spmm(kind, Machine(arch, 132), problem, **options)


def test_few_columns_are_multiplied_by_it() -> None:
    for n, inner, cluster, right in (
        (16, 4096, 1, 8),
        (32, 4096, 1, 8),
        (16, 14336, 2, 8),
        (32, 4096, 1, 4),
        (16, 4096, 1, 16),
    ):
        config = chosen(n, inner, right=right)
        assert isinstance(config, ResidentConfig) and config.cluster == cluster, (n, inner, right)
        assert config.smem_bytes <= SHARED_BYTES and config.tile * cluster >= inner
        blocks = -(-1792 // config.block_rows)
        assert 124 <= blocks * cluster <= 132  # all at once
    assert "rows of B stay in the shared memory" in reason(chosen(16), 1792, 1792 * 2048, 2148)


def test_others_are_not() -> None:
    for n, inner, options in (
        (64, 4096, {}),
        (16, 28672, {}),
        (16, 4096, {"single_use": True}),
        (16, 4096, {"transposes": True}),
    ):
        assert not isinstance(chosen(n, inner, **options), ResidentConfig), (n, inner, options)
    assert not isinstance(chosen(16, arch="sm_80"), ResidentConfig)


def test_rows_of_any_pitch_are_not_copied() -> None:
    memory = torch.zeros(4096 * 3 + 5, dtype=torch.int8)
    for shape, strides, first, copied in (
        ((4096, 1), (1, 1), 0, False), ((4096, 3), (3, 1), 5, False), ((8, 16), (16, 1), 1, False), ((6, 4), (1, 6), 0, True),
    ):  # fmt: skip
        rows = memory.as_strided(shape, strides, first)
        operand = DenseOperand(rows, 8, True, -2, -1)
        assert gpu.copies(operand, -1) and gpu.copies(operand, -1, any_rows=True) is copied
        assert copied or gpu.aligned_rows(operand, -1, shape[0], any_rows=True) is rows


class Launches(list[Any]):
    """A kernel that keeps what it is asked to launch."""

    def launch(self, grid: Any, args: Any, cluster: Any, pdl: bool) -> None:
        self.append((grid, args))


def test_many_matrices_are_several_launches() -> None:
    config = config_of(tile=64, block_rows=3)
    copy, none = config.pack(vectors_of(random_mask(5, 60, 0.4, 1)), 60), ScaleArg(0, 0, 0)
    scale, b = ScaleArg(1 << 30, 1, 20), DenseArg(1 << 40, 20, 1200, 20)
    kernel = Launches()
    config.launch(kernel, copy, b, OutputArg(1 << 50, 40_000, 40, 60, 20), none, scale, 0)  # type: ignore[arg-type]
    assert [grid for grid, _ in kernel] == [(2, 65_534, 1), (2, 14_466, 1)]
    (_, one), (_, other) = kernel
    moved = {i: y - x for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y}
    assert list(moved.values()) == [32_767 * 1200, 32_767 * 40 * 20 * 4, 32_767 * 20 * 4]
    with pytest.raises(ValueError, match="config must have at most 65535 N tiles, got 65536 of 16 columns"):
        config.launch(kernel, copy, b, OutputArg(1 << 50, 1, 40, 60, 65_536 * 16), none, scale, 0)  # type: ignore[arg-type]


def test_a_launch_tells_the_kernel_how_it_may_read() -> None:
    """Argument 7: rows of B start at multiples of 16 bytes; the last one: A may be read before the kernel ahead ends."""
    config = config_of(tile=64, block_rows=3)
    copy, none = config.pack(vectors_of(random_mask(5, 60, 0.4, 1)), 60), ScaleArg(0, 0, 0)
    for early in (False, True):
        for pointer, pitch, batch in ((1 << 40, 32, 1920), (1 << 40, 1, 0), (1 << 40, 24, 0), (8, 32, 0), (16, 32, 24)):
            kernel, b = Launches(), DenseArg(pointer, pitch, batch, 20)
            config.launch(kernel, copy, b, OutputArg(1 << 50, 1, 40, 60, 20), none, none, 0, early)  # type: ignore[arg-type]
            ((_, arguments),) = kernel
            assert arguments[7] == (pointer % 16 == pitch % 16 == batch % 16 == 0) and arguments[-1] == early
