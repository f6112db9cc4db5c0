"""ListOps of the Long Range Arena: nested lists of digits under MIN, MAX, MED and SM, and the digit each comes to.

``[MAX 4 [MIN 6 2 ] 0 ]`` comes to 4.  SM is the sum modulo 10, MED the median, of an even count the mean of the two
in the middle, rounded down.  A node that may be an operator is one with a given probability and has 2 to ``max_args``
arguments; trees outside of the lengths are drawn anew.
Source: Nangia, Bowman, arXiv 1804.06028; Tay et al., arXiv 2011.04006, section 3.1 and its published parameters.
Run: ``python examples/data/listops.py [--count N --seed S --tiny --out FILE]`` writes lines "digit, tab, list".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
WORDS = ("<pad>", "<class>", *map(str, range(10)), "[MIN", "[MAX", "[MED", "[SM", "]")
PAD, CLASS, DIGIT, OPERATOR, CLOSE = 0, 1, 2, 12, 16  # numbers of the words; ten digits and four operators follow
CLASSES, OPERATORS = 10, ("MIN", "MAX", "MED", "SM")
_TREES = 2048  # drawn at once
_BARREN = 200  # draws in a row without a tree of an admissible length


@dataclass(frozen=True)
class ListOps:
    """What lists are drawn: the published parameters by default.

    Arguments:
        max_depth: nodes of this depth, the root's being 1, are digits.
        max_args: most arguments of an operator, at least 2.
        min_length, max_length: words of a list, brackets included.
        operator_share: probability that a node above ``max_depth`` is an operator.
    Raises ``ValueError`` for values that leave no list.
    """

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000
    operator_share: float = 0.25

    def __post_init__(self) -> None:
        if self.max_depth < 1:
            raise ValueError(f"max_depth must be at least 1, got {self.max_depth}")
        if self.max_args < 2:
            raise ValueError(f"max_args must be at least 2, got {self.max_args}")
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"min_length must lie in [1, max_length = {self.max_length}], got {self.min_length}")
        if not 0 < self.operator_share <= 1:
            raise ValueError(f"operator_share must lie in (0, 1], got {self.operator_share}")


TINY = ListOps(max_depth=5, max_args=8, min_length=30, max_length=255)


class Sample(NamedTuple):
    """Numbers of the words, uint8 (length,), and the digit that the list comes to."""

    words: NDArray[np.uint8]
    label: int


class _Level(NamedTuple):
    """Nodes of one depth; those of one parent lie together, in the order of the parents."""

    tokens: Ints  # a digit's or an operator's word
    args: Ints  # 0 of a digit

    def parents(self) -> NDArray[np.bool_]:
        return self.args > 0

    def starts(self) -> Ints:
        """First child of each operator, in the next level."""
        counts = self.args[self.parents()]
        return np.cumsum(counts) - counts


def _draw(kind: ListOps, random: np.random.Generator) -> list[_Level]:
    """``_TREES`` trees, level by level."""
    levels, count = [], _TREES
    for depth in range(1, kind.max_depth + 1):
        operator = (random.random(count) < kind.operator_share) & (depth < kind.max_depth)
        digits = DIGIT + random.integers(0, 10, count)
        operators = OPERATOR + random.integers(0, len(OPERATORS), count)
        args = np.where(operator, random.integers(2, kind.max_args + 1, count), 0)
        levels.append(_Level(np.where(operator, operators, digits), args))
        count = int(args.sum())
        if not count:
            break
    return levels


def _results(operators: Ints, values: Ints, starts: Ints, counts: Ints) -> Ints:
    """What operators make of the values of their arguments, which lie one after another."""
    inside = np.sort(np.repeat(np.arange(len(counts)), counts) * CLASSES + values) % CLASSES
    median = (inside[starts + (counts - 1) // 2] + inside[starts + counts // 2]) // 2
    rest = [np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)]
    return np.choose(operators - OPERATOR, [*rest, median, np.add.reduceat(values, starts) % 10])


def _measure(levels: Sequence[_Level]) -> tuple[list[Ints], Ints]:
    """Words under each node of each level, and what each tree comes to."""
    lengths: list[Ints] = []
    values = np.empty(0, np.int64)
    for level in reversed(levels):
        mine, length, parents = level.tokens - DIGIT, np.ones_like(level.args), level.parents()
        if parents.any():
            starts = level.starts()
            length[parents] = 2 + np.add.reduceat(lengths[-1], starts)
            mine[parents] = _results(level.tokens[parents], values, starts, level.args[parents])
        lengths.append(length)
        values = mine
    return lengths[::-1], values


def _write(levels: Sequence[_Level], lengths: Sequence[Ints]) -> NDArray[np.uint8]:
    """The words of all trees, one after another."""
    flat = np.zeros(int(lengths[0].sum()), np.uint8)
    places = np.cumsum(lengths[0]) - lengths[0]
    for depth, level in enumerate(levels):
        parents = level.parents()
        flat[places] = level.tokens
        flat[(places + lengths[depth] - 1)[parents]] = CLOSE
        if parents.any():
            counts, below = level.args[parents], lengths[depth + 1]
            before = np.cumsum(below) - below
            places = np.repeat(places[parents] + 1 - before[level.starts()], counts) + before
    return flat


def samples(kind: ListOps, seed: int | Sequence[int]) -> Iterator[Sample]:
    """Lists without end, the same for the same ``kind`` and ``seed``, however many are taken.

    Raises ``ValueError`` where hardly any tree has an admissible length.
    """
    barren, number = 0, 0
    while barren < _BARREN:
        levels = _draw(kind, np.random.default_rng(np.random.SeedSequence([*np.atleast_1d(seed).tolist(), number])))
        lengths, values = _measure(levels)
        words, ends = _write(levels, lengths), np.cumsum(lengths[0])
        kept = np.flatnonzero((lengths[0] >= kind.min_length) & (lengths[0] <= kind.max_length))
        for tree in kept:
            yield Sample(words[ends[tree] - lengths[0][tree] : ends[tree]].copy(), int(values[tree]))
        barren, number = 0 if len(kept) else barren + 1, number + 1
    raise ValueError(f"min_length and max_length must admit some trees of {kind}, got none of {_BARREN * _TREES} drawn")


def text(words: Sequence[int] | NDArray[np.uint8]) -> str:
    """The list as it is written, words apart."""
    return " ".join(WORDS[word] for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="short lists")
    parser.add_argument("--out", type=Path, help="file to write; default the terminal")
    args = parser.parse_args()
    drawn = samples(TINY if args.tiny else ListOps(), args.seed)
    lines = [f"{label}\t{text(words)}\n" for words, label in (next(drawn) for _ in range(args.count))]
    if args.out is None:
        sys.stdout.writelines(lines)
    else:
        args.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
