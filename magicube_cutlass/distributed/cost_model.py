"""Bytes and time of tensor-parallel linear layers: no tensors, no torch.

A layer (out, in) of density d on n GPUs: the product's time falls with n, and what it exchanges is added. Bytes are
those that a rank sends, by rings; ``WireBytes`` counts the same on 1 to 4 processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["CLUSTERS", "Cluster", "LayerPlan", "LinearShape", "plan_layers", "sent_bytes", "traffic"]

SCALE_BYTES = 4  # of a token, float32
REDUCE_BYTES = {"exact": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Cluster:
    """GPUs and their links.

    Attributes
    ----------
    gpus, per_host : int
        In all, and of one host.
    inside, between : float
        Bytes per second that a GPU sends to others of its host, and to other hosts.
    latency : float
        Seconds of a collective, per step of its ring.
    memory, integer_rate : float
        Bytes per second of HBM, and int8 operations per second, both attainable.
    source : str
        Where the link figures are from.

    Examples
    --------
    >>> Cluster(2, 2).link == CLUSTERS[2].inside
    True
    """

    gpus: int
    per_host: int
    inside: float = 229e9
    between: float = 50e9
    latency: float = 3e-6
    memory: float = 3.9e12
    integer_rate: float = 0.9e15
    source: str = "all-gather of a pair of H200s, measured"

    @property
    def link(self) -> float:
        """Bytes per second of the slowest link that a ring over all GPUs passes."""
        return self.inside if self.gpus <= self.per_host else self.between


# 2: measured (229 to 257 GB/s). 8: NVLink 4 of an H200, 900 GB/s in both directions, at the pair's share of its peer
# copy. 64: one 400 Gb/s port of ConnectX-7 per GPU.
CLUSTERS = {
    2: Cluster(2, 2),
    8: Cluster(8, 8, inside=270e9, source="NVLink 4: 450 GB/s each way by specification, 0.6 of it"),
    64: Cluster(64, 8, inside=270e9, source="400 Gb/s per GPU between hosts by specification"),
}


def cluster_of(gpus: int) -> Cluster:
    """Return the cluster of so many GPUs: one host up to 8, hosts of 8 beyond.

    Examples
    --------
    >>> cluster_of(4).per_host, cluster_of(16).link
    (8, 50000000000.0)
    """
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}")
    near = CLUSTERS[2 if gpus <= 2 else 8 if gpus <= 8 else 64]
    return Cluster(gpus, near.per_host, near.inside, near.between, source=near.source)


def sent_bytes(collective: str, size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a ring.

    Parameters
    ----------
    collective : str
        ``"all_gather_into_tensor"``, ``"reduce_scatter_tensor"``, ``"all_reduce"`` or ``"broadcast"``.
    size : int
        Bytes of the input on this rank.
    ranks : int
        Processes.

    Examples
    --------
    >>> sent_bytes("all_gather_into_tensor", 100, 4), sent_bytes("all_reduce", 100, 4)
    (300, 150)
    """
    others = ranks - 1
    return {
        "all_gather_into_tensor": others * size,
        "reduce_scatter_tensor": others * size // ranks,
        "all_reduce": 2 * others * size // ranks,
        "broadcast": size if others else 0,
    }[collective]


class LinearShape(NamedTuple):
    """A linear layer y = x A^T."""

    name: str
    out: int
    inner: int
    density: float = 1.0
    bits: int = 8


def _gathered(size: int, ranks: int) -> int:
    """Bytes of an all-gather, whose messages are multiples of 8."""
    return sent_bytes("all_gather_into_tensor", -(-size // 8) * 8, ranks)


def traffic(
    style: str, layer: LinearShape, tokens: int, ranks: int, *, cut_tokens: bool = True, static: bool = False,
    reduce: str = "exact",
) -> int:  # fmt: skip
    """Return the bytes that the first rank sends in one forward pass of a layer; others have no more tokens than it.

    Parameters
    ----------
    style : {"colwise", "rowwise"}
        Which style.
    layer : LinearShape
        Sizes.
    tokens, ranks : int
        Rows of x on all ranks; processes.
    cut_tokens : bool, default True
        Whether tokens outside of the pair of layers are cut over ranks (sequence-parallel); else on all of them.
    static : bool, default False
        Whether the activation scale is static, so that no scale travels.
    reduce : {"exact", "bfloat16", "int8"}, default "exact"
        As in ``SparseRowwise``.

    Examples
    --------
    >>> traffic("colwise", LinearShape("up", 4096, 1024), 512, 2)  # 256 tokens of 1024 bytes and a scale
    263168
    """
    if style not in ("colwise", "rowwise"):
        raise ValueError(f"style must be 'colwise' or 'rowwise', got {style!r}")
    if ranks == 1:
        return 0
    part = -(-tokens // ranks)
    scale = 0 if static else SCALE_BYTES
    if style == "colwise":
        return _gathered(part * (layer.inner + scale), ranks) if cut_tokens else 0
    amax = sent_bytes("all_reduce", tokens * scale, ranks)
    width = REDUCE_BYTES[reduce]
    if reduce == "int8":
        row = layer.out + SCALE_BYTES
        return amax + ((tokens - part) * row if cut_tokens else _gathered(tokens * row, ranks))
    if cut_tokens:
        return amax + sent_bytes("reduce_scatter_tensor", part * ranks * layer.out * width, ranks)
    return amax + sent_bytes("all_reduce", tokens * layer.out * width, ranks)


def product_seconds(layer: LinearShape, tokens: int, ranks: int, cluster: Cluster) -> float:
    """Return the time of a rank's product: operations or memory, whichever takes longer."""
    weights = layer.out * layer.inner * layer.density / ranks
    operations = 2 * weights * tokens
    moved = weights * (layer.bits / 8 + 0.5) + tokens * (layer.inner + 2 * layer.out / ranks)
    return max(operations / cluster.integer_rate, moved / cluster.memory) + cluster.latency


class LayerPlan(NamedTuple):
    """What to do with a layer."""

    layer: LinearShape
    style: str  # "one GPU", "SparseColwise", "SparseRowwise"
    bytes: int
    seconds: float  # with the style
    alone: float  # on one GPU


def plan_layers(layers: list[LinearShape], tokens: int, cluster: Cluster, reduce: str = "exact") -> list[LayerPlan]:
    """Return the style of each layer: pairs of a wide and the layer behind it become Colwise and Rowwise.

    A pair is cut if that is predicted to be faster than on one GPU, exchange included.

    Parameters
    ----------
    layers : list of LinearShape
        In the order of the model.
    tokens : int
        Rows of x.
    cluster : Cluster
        GPUs and links.
    reduce : str, default "exact"
        What sums travel as.

    Examples
    --------
    >>> up, down = LinearShape("up", 16384, 4096, 0.5), LinearShape("down", 4096, 16384, 0.5)
    >>> [each.style for each in plan_layers([up, down], 8192, CLUSTERS[2], "bfloat16")]
    ['SparseColwise', 'SparseRowwise']
    >>> {each.style for each in plan_layers([up, down], 1, CLUSTERS[64])}
    {'one GPU'}
    """
    found: list[LayerPlan] = []
    i = 0
    while i < len(layers):
        pair = layers[i : i + 2]
        if len(pair) == 2 and pair[0].out != pair[1].inner:
            pair = pair[:1]
        styles = ("colwise", "rowwise")[: len(pair)]
        sent = [
            traffic(style, each, tokens, cluster.gpus, reduce=reduce) for style, each in zip(styles, pair, strict=True)
        ]
        if len(pair) == 1:  # its outputs are cut: the next layer's all-gather is counted there
            sent[0] += sent_bytes("all_gather_into_tensor", -(-tokens // cluster.gpus) * 2 * pair[0].out, cluster.gpus)
        rounds = cluster.latency * 2 * (cluster.gpus - 1)
        alone = [product_seconds(each, tokens, 1, cluster) for each in pair]
        cut = [
            product_seconds(each, tokens, cluster.gpus, cluster) + each_sent / cluster.link + rounds
            for each, each_sent in zip(pair, sent, strict=True)
        ]
        faster = cluster.gpus > 1 and sum(cut) < sum(alone)
        for style, each, each_sent, time, single in zip(styles, pair, sent, cut, alone, strict=True):
            name = f"Sparse{style.capitalize()}" if faster else "one GPU"
            found.append(LayerPlan(each, name, each_sent, time, single))
        i += len(pair)
    return found
