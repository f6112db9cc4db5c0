"""The rules of ``layout/column_order_search.cuh`` again, in Python, for the tests of the engine and of the kernel."""

from itertools import pairwise

from torch import Tensor

PHASE, TRIALS, MASK = 8, 32, 0xFFFFFFFF


def walk(until: list[list[int]], trial: int, group: int, window: int) -> tuple[int, list[tuple[int, list[int]]]]:
    """Cost of a row in one of the ways, and of each step its number and what it takes of each residue."""
    ahead, loud, state = trial % 8, trial // 8 * 12, trial
    placed, steps, cost, oldest, step = [0] * PHASE, [], 0, 0, 0
    while placed != until[-1]:
        while all(up <= done for up, done in zip(until[oldest], placed, strict=True)):
            oldest += 1
        end = min(oldest + window, len(until))
        cost += 1
        for _ in range(group // PHASE):
            allowed = [up - done for up, done in zip(until[end - 1], placed, strict=True)]
            if sum(allowed):
                excess = [-(1 << 20)] * PHASE
                for tile in range(oldest, min(end + ahead, len(until))):
                    found = [up - done for up, done in zip(until[tile], placed, strict=True)]
                    excess = [max(old, PHASE * f - sum(found)) for old, f in zip(excess, found, strict=True)]
                keys = []
                for i in range(PHASE):
                    state = (state * 1664525 + 1013904223) & MASK
                    keys.append((excess[i] * 64 + (state >> 16) % 64 * loud) * PHASE + i)
                wanted = min(PHASE, sum(allowed))
                level = next(n for n in range(1, 9) if sum(min(a, n) for a in allowed) >= wanted)
                take = [0] * PHASE
                for i in sorted(range(PHASE), key=lambda i: -keys[i]):
                    take[i] = min(allowed[i], level, wanted - sum(take))
                cost += 2 * max(take)
                steps.append((step, take))
                placed = [done + each for done, each in zip(placed, take, strict=True)]
            step += 1
    return cost, steps


def expected_slots(columns: Tensor, row_offsets: Tensor, tile: int, tiles: int, group: int, window: int) -> list[int]:
    """What ``ordered_slots`` has to return."""
    slots = [-1] * columns.numel()
    bounds = row_offsets.tolist()
    for first, last in pairwise(bounds):
        mine = columns[first:last].tolist()
        queues = [[first + i for i, c in enumerate(mine) if c % PHASE == r] for r in range(PHASE)]
        until = [[sum(c // tile <= t and c % PHASE == r for c in mine) for r in range(PHASE)] for t in range(tiles)]
        best = min(range(TRIALS), key=lambda trial: (walk(until, trial, group, window)[0], trial))
        for step, take in walk(until, best, group, window)[1]:
            place = step * PHASE
            for residue, count in enumerate(take):
                for _ in range(count):
                    slots[queues[residue].pop(0)] = place
                    place += 1
    return slots
