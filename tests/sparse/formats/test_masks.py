"""Masks: every query gets the keys it asked for, and no others than those of its vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import magicube_cutlass as mc
from magicube_cutlass import masks

SIZES = [(64, 64), (61, 90), (90, 61), (8, 200), (1, 1), (0, 5), (5, 0)]
MAKERS: dict[str, dict[str, Any]] = {
    "local": {"window": 5},
    "strided": {"stride": 7},
    "global_tokens": {"tokens": 3},
    "random": {"sparsity": 0.8},
    "bigbird": {"window": 4, "tokens": 2, "random_keys": 0},
}


def rounded(elements: Tensor, v: int) -> Tensor:
    """The mask in whole vectors, worked out without the library."""
    wide = elements.clone()
    for row in range(0, elements.shape[0], v):
        wide[row : row + v] = elements[row : row + v].any(0)
    return wide


def grid(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(queries)[:, None], torch.arange(keys)


def elements(name: str, queries: int, keys: int, v: int, causal: bool) -> Tensor:
    """What each query asks for."""
    i, j = grid(queries, keys)
    if name == "local":
        mask = (i - j).abs() <= 5
    elif name == "strided":
        mask = (i // v * v - j) % 7 == 0
    elif name == "global_tokens":
        mask = (i < 3) | (j < 3)
    else:
        mask = ((i - j).abs() <= 4) | (i < 2) | (j < 2)
    return mask & (j <= (i if name == "local" else i // v * v + v - 1)) if causal else mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["local", "strided", "global_tokens", "bigbird"])
def test_a_mask_is_what_was_asked_for_rounded_up_to_vectors(name: str, causal: bool) -> None:
    for queries, keys in SIZES:
        for v in (1, 2, 8, 16):
            made = getattr(masks, name)(queries, keys=keys, vector_length=v, causal=causal, **MAKERS[name])
            made.check_format(full=True)
            wanted = elements(name, queries, keys, v, causal)
            expected = rounded(wanted, v)
            if causal:  # no key after the vector's last query
                i, j = grid(queries, keys)
                expected &= j <= torch.minimum(i // v * v + v, torch.tensor(queries)) - 1
            assert torch.equal(made.to_dense(), expected), (queries, keys, v)


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_causal_mask_has_every_earlier_key_and_no_vector_that_is_all_later(name: str) -> None:
    full = getattr(masks, name)(90, vector_length=8, **MAKERS[name]).to_dense()
    made = getattr(masks, name)(90, vector_length=8, causal=True, **MAKERS[name])
    i, j = grid(90, 90)
    assert not (made.to_dense() & (j > i // 8 * 8 + 7)).any()
    if name != "random":
        below = full & (j <= i)
        assert torch.equal(made.to_dense() & below, below)


@pytest.mark.parametrize("causal", [False, True])
def test_random_keeps_the_exact_share_and_depends_on_the_seed_alone(causal: bool) -> None:
    made = masks.random(128, 0.9, keys=96, causal=causal, seed=3)
    allowed = sum(min(8 * r + 8, 96) for r in range(16)) if causal else 16 * 96
    assert made.vectors == round(0.1 * allowed)
    assert made.equals(masks.random(128, 0.9, keys=96, causal=causal, seed=3))
    assert not made.equals(masks.random(128, 0.9, keys=96, causal=causal, seed=4))
    assert masks.random(128, 0.0, keys=96, causal=causal).vectors == allowed
    assert masks.random(128, 1.0, keys=96, causal=causal).vectors == 0


def test_causal_random_vectors_are_spread_evenly() -> None:
    made = masks.random(1024, 0.5, causal=True, seed=1)
    lengths, rows = made.row_lengths.double(), torch.arange(128) * 8.0 + 8
    assert ((lengths - rows / 2).abs() <= 5 * rows.sqrt() / 2).all()  # five standard deviations


def test_bigbird_adds_its_random_keys() -> None:
    plain = masks.bigbird(256, window=8, tokens=4, random_keys=0)
    made = masks.bigbird(256, window=8, tokens=4, random_keys=16, seed=2)
    added = made.to_dense() & ~plain.to_dense()
    assert torch.equal(plain.to_dense() & made.to_dense(), plain.to_dense())
    assert (added[8::8].sum(1) <= 16).all() and 10 < added[8::8].sum(1).float().mean() < 16


def test_global_tokens_may_have_any_position() -> None:
    made = masks.global_tokens(20, torch.tensor([9, 9, 25]), keys=30, vector_length=4)
    i, j = grid(20, 30)
    assert torch.equal(made.to_dense(), rounded((i == 9) | (j == 9) | (j == 25), 4))


def test_a_dense_mask_of_several_heads_gives_a_pattern_each() -> None:
    dense = torch.rand(3, 21, 30, generator=torch.Generator().manual_seed(0)) < 0.1
    found = masks.from_mask(dense, vector_length=8)
    assert isinstance(found, list) and len(found) == 3
    for pattern, head in zip(found, dense, strict=True):
        assert torch.equal(pattern.to_dense(), rounded(head, 8))
    single = masks.from_mask(dense[0])
    assert isinstance(single, mc.Pattern) and torch.equal(single.to_dense(), rounded(dense[0], 8))


MODS = {
    "window": lambda b, h, q, k: (q - k).abs() < 40,
    "causal": lambda b, h, q, k: q >= k,
    "heads": lambda b, h, q, k: (q - k) % (h * 17 + 31) < 5,
    "all": lambda b, h, q, k: q >= 0,
    "none": lambda b, h, q, k: q < 0,
}


@pytest.mark.parametrize("name", list(MODS))
@pytest.mark.parametrize("size", [(256, 256), (250, 130)])
def test_a_block_mask_gives_what_its_function_says(name: str, size: tuple[int, int]) -> None:
    heads = 2 if name == "heads" else 1
    block = create_block_mask(MODS[name], 1, heads, *size, device="cpu", BLOCK_SIZE=64)
    found = masks.from_block_mask(block, vector_length=4)
    patterns = found if isinstance(found, list) else [found]
    assert len(patterns) == heads
    i, j = grid(*size)
    for head, pattern in enumerate(patterns):
        pattern.check_format(full=True)
        assert torch.equal(pattern.to_dense(), rounded(MODS[name](0, head, i, j).expand(size), 4))


def test_a_block_mask_that_reads_a_table_is_evaluated_inside_it() -> None:
    document = torch.repeat_interleave(torch.arange(5), 30)
    block = create_block_mask(
        lambda b, h, q, k: document[q] == document[k], 1, 1, 150, 150, device="cpu", BLOCK_SIZE=32
    )
    found = masks.from_block_mask(block)
    assert isinstance(found, mc.Pattern)
    assert torch.equal(found.to_dense(), rounded(document[:, None] == document, 8))


@settings(max_examples=40)
@given(st.integers(0, 40), st.integers(1, 40), st.sampled_from([1, 4, 8]), st.integers(0, 99))
def test_union_has_the_vectors_of_each(queries: int, keys: int, v: int, seed: int) -> None:
    parts = [masks.random(queries, s, keys=keys, vector_length=v, seed=seed + n) for n, s in enumerate((0.9, 0.5, 1.0))]
    dense = torch.stack([part.to_dense() for part in parts]).any(0)
    both = masks.union(*parts)
    both.check_format(full=True)
    assert torch.equal(both.to_dense(), dense)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.local(8, -1), "window must be at least 0, got -1"),
        (lambda: masks.strided(8, 0), "stride must be at least 1, got 0"),
        (lambda: masks.random(8, 1.5), r"sparsity must lie in \[0, 1\], got 1.5"),
        (lambda: masks.random(8, -0.5, causal=True), r"sparsity must lie in \[0, 1\], got -0.5"),
        (lambda: masks.bigbird(8, window=1, tokens=0, random_keys=9), "random_keys must be at most the 8 keys, got 9"),
        (lambda: masks.global_tokens(8, torch.tensor([8])), r"tokens\[0\] must lie in \[0, 8\), got 8"),
        (lambda: masks.local(8, 1, vector_length=3), "vector_length must be one of"),
        (lambda: masks.from_mask(torch.ones(3, dtype=torch.bool)), "mask must have 2 or 3 dimensions, got 1"),
        (masks.union, "union needs at least 1 mask, got 0"),
        (lambda: masks.union(masks.local(8, 1), masks.local(9, 1)), r"masks must agree .*\(8, 8\).*\(9, 9\)"),
    ],
)
def test_bad_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_types_and_block_masks_are_named() -> None:
    with pytest.raises(TypeError, match=r"window must be an integer, got 1\.5"):
        masks.local(8, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mask must be a BlockMask"):
        masks.from_block_mask(torch.ones(2, 2))
    batched = create_block_mask(lambda b, h, q, k: q >= b, 2, 1, 64, 64, device="cpu", BLOCK_SIZE=32)
    with pytest.raises(ValueError, match=r"mask must be of batch 1, .* got 2"):
        masks.from_block_mask(batched)
    fine = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(ValueError, match="blocks of whole vectors of 32 queries, got 16"):
        masks.from_block_mask(fine, vector_length=32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local:64:window=3", masks.local(64, 3)),
        ("local:64:window=3,causal=1,keys=40", masks.local(64, 3, causal=True, keys=40)),
        ("random:64:sparsity=0.75,seed=2", masks.random(64, 0.75, seed=2)),
        ("bigbird:64:window=2,tokens=1,random_keys=4", masks.bigbird(64, window=2, tokens=1, random_keys=4)),
    ],
)
def test_spy_draws_masks(text: str, expected: mc.Pattern, tmp_path: Path) -> None:
    from magicube_cutlass.cli import main
    from magicube_cutlass.cli.spy import parse_mask

    assert parse_mask(text, 8).equals(expected)
    with pytest.raises(SystemExit) as stop:
        main(["spy", "--mask", text, "--out", str(tmp_path / "mask.png")])
    assert stop.value.code == 0 and (tmp_path / "mask.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask", "round:64"], "mask must begin with one of local, strided"),
        (["--mask", "local:64:window=-3"], "window must be at least 0, got -3"),
        (["--mask", "local:x:window=3"], "mask 'local:x:window=3': invalid literal"),
        (["--mask", "local:64:height=3"], "unexpected keyword argument 'height'"),
        ([], "give one of them"),
    ],
)
def test_spy_names_mistakes(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from magicube_cutlass.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["spy", *arguments, "--out", str(tmp_path / "mask.png")])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and message in told and told.count("\n") == 1, told
