"""Text classification by single bytes, from a folder laid out as the IMDb reviews are.

``FOLDER/train/<class>/*.txt`` and ``FOLDER/test/<class>/*.txt``; the folders' names are the classes, those of ``test``
among those of ``train``, and ``unsup`` is passed over.  A byte b becomes the number b + 2; 0 is padding, 1 the word
whose place the class is read from.
Source: Tay et al., arXiv 2011.04006, section 3.2; Maas et al., ACL 2011, for the layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PAD, CLASS, BYTE = 0, 1, 2
VOCABULARY = 256 + BYTE
_UNLABELLED = "unsup"


class Sample(NamedTuple):
    """Numbers of the bytes, int16 (length,), and the class."""

    words: NDArray[np.int16]
    label: int


def classes(folder: Path) -> list[str]:
    """Names of the classes, in order; raises ``ValueError`` where ``folder`` is not laid out as it should be."""
    found = [
        each.name
        for each in (sorted((folder / "train").iterdir()) if (folder / "train").is_dir() else [])
        if each.is_dir() and each.name != _UNLABELLED
    ]
    if len(found) < 2:
        raise ValueError(f"folder must hold train/<class>/*.txt of at least 2 classes, got {len(found)} in {folder}")
    return found


def samples(folder: Path, split: str, max_length: int, seed: int = 0) -> list[Sample]:
    """The texts of ``split``, "train" or "test", cut to ``max_length`` bytes, in an order drawn by ``seed``.

    Raises ``ValueError`` for another layout, a class without texts in ``train``, a ``split`` without any.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    found = []
    for label, name in enumerate(classes(folder)):
        paths = sorted((folder / split / name).glob("*.txt"))
        if not paths and split == "train":
            raise ValueError(f"folder must hold texts of every class, got none in {folder / split / name}")
        for path in paths:
            raw = np.frombuffer(path.read_bytes()[:max_length], np.uint8)
            found.append(Sample(raw.astype(np.int16) + BYTE, label))
    if not found:
        raise ValueError(f"folder must hold {split}/<class>/*.txt, got none in {folder / split}")
    return [found[i] for i in np.random.default_rng(seed).permutation(len(found))]
