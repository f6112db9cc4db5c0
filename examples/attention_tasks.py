"""Two tasks that attention decides, the masks under which they are learned, and the encoder that learns them.

*Recall*: eight questions, then pairs of a key and its value, a word each. An answer is the value of the key that is
asked: without attention it is a guess. *Pixels*: four or eight words without content, then an image of Fashion-MNIST, a
word per pixel. The class is read at the first words, which know nothing of the image without attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from encoder_training import Corpus
from lenet_fashion_mnist import FILES, missing, read_idx
from report import data_folder
from sparse_encoder import VECTOR, Attention, Encoder, Shape
from torch import Tensor, nn
from torch.nn import functional as F

import magicube_cutlass as mc

QUESTIONS = 8  # words that ask for a value
VALUES = 16  # a guess is right once in so many
_SPLITS = 1_000_003  # seeds of a split are this far apart


@dataclass(frozen=True)
class Task:
    """A corpus, and the shape of its encoder."""

    corpus: Corpus
    shape: Shape
    read: int  # leading words at which an answer is read
    chance: float  # share of right answers without attention


def recall_pairs(count: int, length: int, seed: int, repeated: bool) -> tuple[Tensor, Tensor]:
    """Questions and pairs, int16 (count, length), and answers, int64 (count, QUESTIONS).

    The keys of a sequence are distinct, drawn from twice as many, and it asks for eight of them.  With `repeated`,
    a sequence has two different pairs or more, each several times, so that there are easy ones to begin with.
    """
    if length % 2 or length < 2 * QUESTIONS + QUESTIONS:
        raise ValueError(f"length must be even and at least {3 * QUESTIONS}, got {length}")
    random = torch.Generator().manual_seed(seed)
    pairs = (length - QUESTIONS) // 2
    words, answers = [], []
    for part in torch.arange(count).split(4096):
        keys = torch.rand(len(part), 2 * pairs, generator=random).argsort(1)[:, :pairs] + 1  # (n, pairs)
        values = torch.randint(VALUES, (len(part), pairs), generator=random)
        if repeated:
            different = 2 * (pairs / 2) ** torch.rand(len(part), 1, generator=random)  # (n, 1), 2 to `pairs`
            one = (torch.rand(len(part), pairs, generator=random) * different).long()  # (n, pairs)
            keys, values = keys.gather(1, one), values.gather(1, one)
        asked = torch.rand(len(part), pairs, generator=random).argsort(1)[:, :QUESTIONS]
        body = torch.stack((keys, values + 2 * pairs + 1), 2).flatten(1)
        words.append(torch.cat((keys.gather(1, asked), body), 1).to(torch.int16))
        answers.append(values.gather(1, asked))
    return torch.cat(words), torch.cat(answers)


def recall(length: int, counts: tuple[int, int], layers: int, heads: int, seed: int) -> Task:
    """Associative recall; training and test sequences are drawn from `seed`."""
    train, test = (
        recall_pairs(count, length, seed * _SPLITS + split, split == 0) for split, count in enumerate(counts)
    )
    vocabulary = 1 + length - QUESTIONS + VALUES
    shape = Shape(vocabulary, VALUES, length, layers, heads, 32)
    return Task(Corpus("recall", train, test, vocabulary, VALUES), shape, QUESTIONS, 1 / VALUES)


def read_words(side: int) -> int:
    return VECTOR - side * side % VECTOR


def pixel_words(images: Tensor, side: int) -> Tensor:
    """Images, uint8 (n, 28, 28), as int16 (n, read + side * side): zeros, then levels of 1 to 256.

    There are 4 or 8 words to read, such that the length is a multiple of 8.
    """
    if side not in (14, 28):
        raise ValueError(f"side must be 14 or 28, got {side}")
    small = images if side == 28 else F.avg_pool2d(images.float()[:, None], 2)[:, 0].round()
    return F.pad(small.flatten(1).to(torch.int16) + 1, (read_words(side), 0))


def pixels(side: int, counts: tuple[int, int], layers: int, heads: int) -> Task:
    """Fashion-MNIST as a sequence of ``side * side`` pixels; raises ``ValueError`` without the files."""
    absent = missing()
    if absent:
        raise ValueError(absent)
    files = [read_idx(data_folder("fashion-mnist") / name) for name in FILES]
    train = pixel_words(files[0][: counts[0]], side), files[1][: counts[0]].long()
    test = pixel_words(files[2][: counts[1]], side), files[3][: counts[1]].long()
    shape = Shape(257, 10, train[0].shape[1], layers, heads, 32)
    return Task(Corpus("pixels", train, test, 257, 10), shape, read_words(side), 0.1)


def reading_mask(length: int, sparsity: float, seed: int) -> mc.Pattern:
    """Window and random keys in 8 x 1 vectors; the first 8 words attend every word, or every second, third...

    The sparsity is exact but for a fraction of a vector. The first vector row takes half of the vectors at most, the
    other rows share the rest alike. Their window has half of it, and the row's own 8 words if they fit.
    Raises ``ValueError`` unless a window and a random key fit in.
    """
    rows = math.ceil(length / VECTOR)
    vectors = round((1 - sparsity) * rows * length)
    apart = math.ceil(2 * length / max(vectors, 1))
    kept = torch.zeros(rows, length, dtype=torch.bool)
    kept[0, apart - 1 :: apart] = True
    each, more = divmod(vectors - int(kept.sum()), rows - 1)
    if each < 2:
        raise ValueError(f"sparsity must leave two keys to a row of {length} words, got {sparsity}")
    window = max(min(VECTOR, each - 1), each // 2)
    for row in range(1, rows):
        start = min(max(VECTOR * row + (VECTOR - window) // 2, 0), length - window)
        kept[row, start : start + window] = True
    drawn = torch.rand(rows - 1, length, generator=torch.Generator().manual_seed(seed))
    order = drawn.masked_fill_(kept[1:], -1).argsort(1, descending=True)
    for row in range(1, rows):
        kept[row, order[row - 1, : each - window + (row <= more)]] = True
    return mc.Pattern.from_dense(kept.repeat_interleave(VECTOR, 0)[:length], VECTOR)


class NoAttention(nn.Module):
    """Zeros: what is left of an encoder without attention."""

    def __init__(self, _: Shape) -> None:
        super().__init__()

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x)


class Levels(nn.Module):
    """Words of pixels, (n, L), as vectors in proportion to their level, (n, L, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(1, width)

    def forward(self, words: Tensor) -> Tensor:
        return self.line((words.float() / 128).unsqueeze(-1))


class Neighbors(nn.Module):
    """Vectors of words, (n, L, width), each with a share of the one before: a convolution of depth one along L."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.each, self.share = words, nn.Parameter(torch.ones(words.embedding_dim))

    def forward(self, words: Tensor) -> Tensor:
        x = self.each(words)
        return x + self.share * F.pad(x[:, :-1], (0, 0, 1, 0))


class Reader(Encoder):
    """An encoder read at its first words: logits (n, classes, QUESTIONS) of recall, (n, classes) of pixels.

    Recall mixes each word with the one before, so that a value knows its key.  Vectors of an image's places begin as
    sums of one of the row and one of the column.  No word is padding.
    """

    def __init__(self, task: Task, attention: Attention) -> None:
        shape = task.shape
        super().__init__(shape, attention)
        self.read, self.image = task.read, task.corpus.name == "pixels"
        width, rest = shape.width, shape.length - task.read
        if self.image:
            self.words = Levels(width)  # type: ignore[assignment]
            side = math.isqrt(rest)
            body = 0.5 * (torch.randn(side, 1, width) + torch.randn(side, width)).flatten(0, 1)
        else:
            self.words = Neighbors(self.words)  # type: ignore[assignment]
            body = 0.1 * torch.randn(rest, width)
        with torch.no_grad():
            self.places.copy_(torch.cat((0.1 * torch.randn(task.read, width), body)))

    def forward(self, words: Tensor, padding: Tensor | None = None) -> Tensor:
        found = self.head(self.hidden(words)[:, : self.read])  # (n, read, classes)
        return found.mean(1) if self.image else found.transpose(1, 2)
