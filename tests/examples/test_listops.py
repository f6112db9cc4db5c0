"""ListOps: grammar, results against an evaluator of its own, the published parameters, determinism; texts by bytes."""

from __future__ import annotations

import sys
from itertools import islice
from math import prod
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "data"))

import bytes_text
import listops
from listops import TINY, ListOps

EVALUATE = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(median(x)), "[SM": lambda x: sum(x) % 10}


def evaluate(line: str) -> tuple[int, int, list[int]]:
    """What a list comes to, its depth, the counts of arguments; by a stack, as the grammar has it."""
    stack: list[tuple[str, list[int]]] = [("", [])]
    deepest, counts = 1, []
    for word in line.split():
        if word in EVALUATE:
            stack.append((word, []))
        elif word == "]":
            operator, values = stack.pop()
            assert len(values) >= 2, "an operator has at least 2 arguments"
            counts.append(len(values))
            stack[-1][1].append(EVALUATE[operator](values))
        else:
            assert len(word) == 1 and word.isdigit(), word
            stack[-1][1].append(int(word))
            deepest = max(deepest, len(stack))
    assert len(stack) == 1 and len(stack[0][1]) == 1, "one list, its brackets closed"
    return stack[0][1][0], deepest, counts


def lines(kind: ListOps, seed: int, count: int) -> list[tuple[str, int]]:
    return [(listops.text(words), label) for words, label in islice(listops.samples(kind, seed), count)]


def test_the_evaluator_knows_the_printed_example() -> None:
    assert evaluate("[MAX 4 [MIN 6 2 ] 0 ]") == (4, 3, [2, 3])
    assert evaluate("[MED 1 8 3 4 ]")[0] == 3 and evaluate("[SM 9 9 3 ]")[0] == 1


def test_published_lists_follow_the_grammar_and_come_to_their_digit() -> None:
    kind = ListOps()
    assert (kind.max_depth, kind.max_args, kind.min_length, kind.max_length) == (10, 10, 500, 2000)
    found = lines(kind, 0, 150)
    deepest, counts = 0, set()
    for line, label in found:
        value, depth, args = evaluate(line)
        assert label == value
        assert 500 <= len(line.split()) <= 2000
        deepest = max(deepest, depth)
        counts |= set(args)
    assert deepest == 10 and counts == set(range(2, 11))
    assert {label for _, label in found} == set(range(10))
    assert {word for line, _ in found for word in line.split()} == set(listops.WORDS[2:])


@settings(max_examples=25)
@given(st.integers(2, 6), st.integers(2, 7), st.integers(0, 2**31))
def test_any_parameters_hold(depth: int, args: int, seed: int) -> None:
    kind = ListOps(max_depth=depth, max_args=args, min_length=4, max_length=80, operator_share=0.4)
    for line, label in lines(kind, seed, 20):
        value, deepest, counts = evaluate(line)
        assert value == label and deepest <= depth and max(counts) <= args and 4 <= len(line.split()) <= 80


def test_operators_and_digits_are_drawn_evenly() -> None:
    words = np.concatenate([words for words, _ in islice(listops.samples(TINY, 3), 2000)])
    counts = np.bincount(words, minlength=len(listops.WORDS))
    for first, several in ((listops.DIGIT, 10), (listops.OPERATOR, 4)):
        some = counts[first : first + several]
        assert (abs(some - some.mean()) < 5 * np.sqrt(some.mean())).all()
    assert counts[listops.CLOSE] == counts[listops.OPERATOR : listops.CLOSE].sum() and counts[:2].sum() == 0


def test_a_seed_gives_the_same_lists_however_many_are_taken() -> None:
    first = lines(TINY, 5, 40)
    assert lines(TINY, 5, 900)[:40] == first
    assert lines(TINY, 6, 40) != first and lines(TINY, (5, 1), 40) != first
    assert len(set(lines(TINY, 5, 900))) > 890


def test_lists_that_cannot_be_are_refused() -> None:
    for wrong, name in (
        ({"max_depth": 0}, "max_depth"), ({"max_args": 1}, "max_args"), ({"min_length": 9, "max_length": 8}, "min_length"),
        ({"operator_share": 0.0}, "operator_share"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            ListOps(**wrong)
    with pytest.raises(ValueError, match="min_length and max_length must admit"):
        next(listops.samples(ListOps(max_depth=2, max_args=3, min_length=100, max_length=200), 0))


def reviews(folder: Path) -> dict[str, bytes]:
    """A folder as the reviews have it; returns the texts to train with by name."""
    texts = {"pos/1_9.txt": b"good \xc3\xa9", "pos/0_8.txt": b"fine", "neg/0_1.txt": b"bad" * 20, "unsup/0_0.txt": b"?"}
    for split in ("train", "test"):
        for name, text in texts.items():
            path = folder / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if split == "train" else text[:3])
    return texts


def test_texts_are_their_bytes(tmp_path: Path) -> None:
    texts = reviews(tmp_path)
    found = bytes_text.samples(tmp_path, "train", 12)
    assert bytes_text.classes(tmp_path) == ["neg", "pos"]
    back = {(bytes((words - bytes_text.BYTE).astype(np.uint8)), label) for words, label in found}
    assert back == {(text[:12], int(name.startswith("pos"))) for name, text in texts.items() if "unsup" not in name}
    assert {len(words) for words, _ in bytes_text.samples(tmp_path, "test", 12)} == {3}
    again = bytes_text.samples(tmp_path, "train", 12)
    assert [label for _, label in again] == [label for _, label in found]
    assert prod(int(words.max()) < bytes_text.VOCABULARY for words, _ in found)


def test_folders_of_another_layout_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder must hold train/<class>"):
        bytes_text.samples(tmp_path, "train", 12)
    reviews(tmp_path)
    with pytest.raises(ValueError, match="split must be"):
        bytes_text.samples(tmp_path, "valid", 12)
    (tmp_path / "train" / "neg" / "0_1.txt").unlink()
    with pytest.raises(ValueError, match="texts of every class"):
        bytes_text.samples(tmp_path, "train", 12)
