"""The kernel of sm_100a and sm_103a as arithmetic: what its launch gets, read as the hardware's manuals have it.

Shared memory is bytes; a box lands there swizzled and with rubbish between unpacked codes; the Tensor Cores find operands
by the bits of descriptors, and factors of blocks in tensor memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cute_kernels import floats
from cute_kernels.scaled_gemm.sm100 import TILE_M, MapParameters, Tcgen05Config
from cute_kernels.scaled_gemm.tcgen05 import COLUMNS, matrix_descriptor

# Of the instruction descriptor, PTX ISA 9.0, tables "Instruction descriptor format": types of .kind::f8f6f4 and mxf8f6f4.
FORMATS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
RUBBISH = 0xA5


def field_of(word: int, low: int, width: int) -> int:
    return word >> low & ((1 << width) - 1)


def swizzled(address: np.ndarray) -> np.ndarray:
    """Where the 128-byte swizzle puts a byte: 16-byte chunks of 1024 aligned bytes change places by their row."""
    return address ^ (address >> 7 & 7) << 4


@dataclass
class Machine:
    """One block's memories."""

    shared: np.ndarray = field(default_factory=lambda: np.full(1 << 18, RUBBISH, dtype=np.uint8))
    factors: np.ndarray = field(
        default_factory=lambda: np.zeros((32, COLUMNS, 4), dtype=np.uint8)
    )  # lane, column, byte

    def tma_load_2d(self, to: int, map: MapParameters, x: int, y: int) -> int:
        """A box at element x of row y; returns the bytes that the barrier counts."""
        bits = map.unpack or 8 * map.element_bytes
        inner, rows = map.shape
        size = map.box[0] * bits // 8
        for row in range(map.box[1]):
            line = np.zeros(size, dtype=np.uint8)
            if y + row < rows:
                count = min(map.box[0], inner - x) * bits // 8
                start = map.pointer + (y + row) * map.pitch_bytes + x * bits // 8
                line[:count] = np.frombuffer(ctypes.string_at(start, count), dtype=np.uint8)
            groups = line.reshape(-1, 2 * bits)  # sixteen codes each
            wide = np.full((len(groups), 16), RUBBISH, dtype=np.uint8)
            wide[:, : 2 * bits] = groups
            place = swizzled(to + row * map.swizzle + np.arange(wide.size))
            self.shared[place] = wide.reshape(-1)
        return size * map.box[1]

    def operand(self, descriptor: int, rows: int, dtype: str, packed: bool) -> torch.Tensor:
        """The codes (rows, 32 or 64) that an instruction finds by a descriptor of k-major rows."""
        assert field_of(descriptor, 61, 3) == 2 and field_of(descriptor, 46, 3) == 1, "swizzle of 128 bytes, sm_100"
        assert field_of(descriptor, 49, 3) == field_of(descriptor, 52, 1) == 0
        start, stride = field_of(descriptor, 0, 14) << 4, field_of(descriptor, 32, 14) << 4
        row = np.arange(rows)[:, None]
        found = self.shared[swizzled(start + row // 8 * stride + row % 8 * 128 + np.arange(32))]  # (rows, 32)
        lines = torch.from_numpy(found)
        if packed:
            return floats.unpack(lines, 64, dtype)
        return floats.unpack(floats.unpad16(lines, dtype), 32, dtype)

    def copy_factors(self, to: int, start: int) -> None:
        """``tcgen05.cp.32x128b.warpx4``: 16 bytes of each of 32 lanes become four columns."""
        block = self.shared[start : start + 512].reshape(32, 4, 4)
        self.factors[:, to : to + 4] = block

    def factors_of(self, column: int, first: int, count: int, rows: int) -> np.ndarray:
        """Codes (rows, count): row 32 i + j has its word in column i and lane j."""
        row = np.arange(rows)
        return self.factors[row % 32, column + row // 32, first : first + count]


@dataclass
class Launch:
    """The arguments of one launch, by the names of the kernel's parameters up to the output."""

    config: Tcgen05Config
    a: MapParameters
    b: MapParameters
    k: int
    part_bytes: int
    instruction: int
    factors_a: int
    factors_b: int
    factor_words: int
    output: tuple[Any, ...]  # from the output's address on

    @property
    def shape(self) -> tuple[int, int]:
        return self.output[2], self.output[3]


def write_factors(machine: Machine, launch: Launch, start: int, address: int, rows: int, first: int, part: int) -> None:
    """The words that 128 threads write for an operand's rows from ``first`` on, as ``scale_producer_loop`` has it."""
    words = launch.config.mma.words
    whole = np.zeros((rows, launch.factor_words, 4), dtype=np.uint8)
    if rows:
        data = ctypes.string_at(address, whole.size)
        whole = np.frombuffer(data, dtype=np.uint8).reshape(whole.shape)
    for thread in range(128):
        row = first + thread % 4 * 32 + thread // 4
        for w in range(words):
            word = part * words + w
            value = whole[row, word] if row < rows and word < launch.factor_words else np.zeros(4, dtype=np.uint8)
            machine.shared[start + 512 * w + 4 * thread :][:4] = value


def multiply_part(machine: Machine, launch: Launch, base: int, sums: np.ndarray, fresh: bool) -> np.ndarray:
    """Four instructions on the part at ``base``."""
    config, kind = launch.config, launch.config.mma
    plane_a, plane_b = TILE_M * 128, config.tile_n * 128
    factor_columns = 2 * config.tile_n
    for w in range(2 * kind.words):
        machine.copy_factors(factor_columns + 4 * w, base + plane_a + plane_b + 512 * w)
    per_step = kind.words  # factors of a row for one instruction
    for step in range(4):
        first = step * per_step % 4
        instruction = launch.instruction | (first << 4 | first << 29 if kind.block else 0)
        m, n = field_of(instruction, 24, 5) << 4, field_of(instruction, 17, 6) << 3
        types = [field_of(instruction, low, 3) for low in (7, 10)]
        names = ["e2m1" if kind.packed and type == 1 else FORMATS[type] for type in types]
        sides = []
        for side, (start, rows) in enumerate(((base, m), (base + plane_a, n))):
            codes = machine.operand(matrix_descriptor(start) + 2 * step, rows, names[side], kind.packed)
            values = floats.decode(codes, names[side], out_dtype=torch.float64)
            if kind.block:
                scale = "ue8m0" if field_of(instruction, 23, 1) else "e4m3"
                column = factor_columns + 4 * (side * kind.words + step * per_step // 4)
                low = field_of(instruction, (29, 4)[side], 2)
                factors = torch.from_numpy(machine.factors_of(column, low, per_step, rows).copy())
                real = floats.decode(factors, scale, out_dtype=torch.float64)
                values = values * real.repeat_interleave(values.shape[1] // per_step, 1)
            else:
                assert field_of(instruction, 4, 2) == 1, "float32 sums"
            sides.append(values)
        product = (sides[0] @ sides[1].t()).numpy()
        sums = product if fresh and step == 0 else sums + product
    return sums


def run(launch: Launch) -> torch.Tensor:
    """The sums (M, N) in float64; checks that the barriers' counts of bytes come out."""
    config, kind = launch.config, launch.config.mma
    m, n = launch.shape
    result = torch.full((m, n), float("nan"), dtype=torch.float64)
    parts = -(-launch.k // kind.tile_k)
    for row in range(0, m, TILE_M):
        for column in range(0, n, config.tile_n):
            machine, sums = Machine(), np.zeros((TILE_M, config.tile_n))
            for part in range(parts):
                base = part % config.stages * config.part_bytes
                counted = machine.tma_load_2d(base, launch.a, part * 128, row)
                counted += machine.tma_load_2d(base + TILE_M * 128, launch.b, part * 128, column)
                assert counted == launch.part_bytes, "a barrier would wait for ever, or not at all"
                if kind.block:
                    start = base + (TILE_M + config.tile_n) * 128
                    write_factors(machine, launch, start, launch.factors_a, m, row, part)
                    write_factors(machine, launch, start + 512 * kind.words, launch.factors_b, n, column, part)
                sums = multiply_part(machine, launch, base, sums, part == 0)
            result[row : row + TILE_M, column : column + config.tile_n] = torch.from_numpy(sums)[
                : m - row, : n - column
            ]
    return result
