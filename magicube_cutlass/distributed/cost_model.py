"""Bytes and time of tensor-parallel linear layers: no tensors, no torch.

A layer (out, in) of density d on n GPUs: the product's time falls with n, and what it exchanges is added. Bytes are
those that a rank sends, by rings; ``WireBytes`` counts the same on 1 to 4 processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = [
    "CLUSTERS",
    "Cluster",
    "LayerPlan",
    "LinearShape",
    "group_layers",
    "layer_seconds",
    "plan_layers",
    "sent_bytes",
    "traffic",
]

SCALE_BYTES = 4  # of a token, float32
REDUCE_BYTES = {"exact": 4, "bfloat16": 2, "int8": 1}
COPIED_BLOCK = 1 << 22  # bytes of a rank's rows from which bfloat16 sums are copied beside products, inside of a host


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
        Seconds that an exchange takes at least: barriers, or the start of a collective.
    memory, sparse_rate, dense_rate, launch : float
        Of a GPU: bytes per second that a product reads, int8 operations per second of sparse and dense products, and
        seconds that a launch takes at least. Fitted to ``benchmarks/results/llm_h200.json`` (0.7 and 0.9 zeros).
    passes : float
        Bytes per second of what quantizes activations and scales sums.
    host : float
        Seconds of host time of a layer whose tokens are cut, below which it takes no less time: 0.75 ms for one layer
        on two H200s, ``distributed_nccl_2.json``.
    source : str
        Where the link figures are from.

    Examples
    --------
    >>> Cluster(2, 2).link == CLUSTERS[2].inside
    True
    """

    gpus: int
    per_host: int
    inside: float = 300e9
    between: float = 50e9
    latency: float = 15e-6
    memory: float = 2.8e12
    sparse_rate: float = 0.25e15
    dense_rate: float = 1.2e15
    launch: float = 4e-6
    passes: float = 2.2e12
    host: float = 0.75e-3
    source: str = "copies between two GPUs of one host, measured"

    @property
    def link(self) -> float:
        """Bytes per second of the slowest link that a ring over all GPUs passes."""
        return self.inside if self.gpus <= self.per_host else self.between


# 2 and 8: copies of 17 to 67 MB of another GPU's memory ran at 337 to 362 GB/s, NCCL's collectives of as many at 190 to
# 270, of NVLink 4's 450 GB/s each way; times of 2 and 4 GPUs follow within a factor (tests/distributed/test_plan.py).
# 64: one 400 Gb/s port of ConnectX-7 per GPU.
CLUSTERS = {
    2: Cluster(2, 2),
    8: Cluster(8, 8),
    64: Cluster(64, 8, source="400 Gb/s per GPU between hosts by specification"),
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
    return replace(near, gpus=gpus)


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
    """Return the time of a rank's product: a launch, and operations or memory, whichever takes longer."""
    stored = layer.out * layer.inner * layer.density / ranks
    rate = cluster.dense_rate if layer.density == 1 else cluster.sparse_rate
    index = 0.0 if layer.density == 1 else 0.5  # bytes per stored element: a column index for 8 of them
    moved = stored * (layer.bits / 8 + index) + tokens * (layer.inner + 2 * layer.out / ranks)
    return cluster.launch + max(2 * stored * tokens / rate, moved / cluster.memory)


def layer_seconds(
    style: str, layer: LinearShape, tokens: int, cluster: Cluster, *, cut_tokens: bool = True, static: bool = False,
    reduce: str = "exact",
) -> float:  # fmt: skip
    """Return the time of a layer's kernels and exchanges on a cluster; one GPU quantizes its tokens and multiplies.

    Beside the product: passes over activations (their amaxes, where ranks hold parts of K) and over sums, and what
    travels, of which inside of a host products hide a part: that of a rank's own tokens, or those of the rows of the
    ranks that follow. Parameters as of :func:`traffic`.

    Examples
    --------
    >>> layer = LinearShape("up", 14336, 4096, 0.1)
    >>> one, two = (layer_seconds("colwise", layer, 8192, cluster_of(n)) for n in (1, 2))
    >>> 1.6 < one / two < 2
    True
    """
    ranks = cluster.gpus
    product, travels = product_seconds(layer, tokens, ranks, cluster), 0.0
    sent = traffic(style, layer, tokens, ranks, cut_tokens=cut_tokens, static=static, reduce=reduce) / cluster.link
    part = -(-tokens // ranks) if cut_tokens else tokens
    if style == "colwise":
        moved = 3.0 * part * layer.inner
        if ranks > 1 and cut_tokens:
            hidden = product / ranks if ranks <= cluster.per_host else 0.0
            travels = max(0.0, sent - hidden) + cluster.latency
    else:
        moved = (3.0 if static or ranks == 1 else 5.0) * tokens * layer.inner / ranks
        if ranks > 1:
            copied = cut_tokens and reduce == "bfloat16" and ranks <= cluster.per_host
            copied = copied and REDUCE_BYTES[reduce] * part * layer.out >= COPIED_BLOCK
            hidden = product * (1 - 1 / ranks) if copied else 0.0
            travels = max(0.0, sent - hidden) + (1 if static else 2) * cluster.latency
            moved += part * layer.out * (6 if reduce == "exact" else 4)  # scales, or adds a bias
            moved += 2.0 * tokens * layer.out if reduce == "exact" else 0.0  # 32 bits of a product, not 16
    return product + moved / cluster.passes + travels


class LayerPlan(NamedTuple):
    """What to do with a layer."""

    layer: LinearShape
    style: str  # "one GPU", "SparseColwise", "SparseRowwise"
    bytes: int  # that a rank sends with the style
    seconds: float  # with the style
    alone: float  # on one GPU


# names of layers whose inputs another layer of the same module left cut
_ROWWISE = ("o_proj", "out_proj", "down_proj", "c_proj", "fc2", "linear2", "w2", "wo", "dense_4h_to_h")


def group_layers(layers: list[LinearShape]) -> list[list[tuple[str, LinearShape]]]:
    """Return the layers that are cut together: those of a module by outputs, and the one behind them by inputs.

    The one behind has a usual name, or follows a layer of as many outputs as it has inputs.

    Examples
    --------
    >>> names = [LinearShape(f"h.0.{name}", *size) for name, size in (("down_proj", (8, 32)), ("up_proj", (32, 8)))]
    >>> [[(style, layer.name) for style, layer in group] for group in group_layers(names)]
    [[('colwise', 'h.0.up_proj'), ('rowwise', 'h.0.down_proj')]]
    """
    modules: dict[str, list[LinearShape]] = {}
    for layer in layers:
        modules.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    found: list[list[tuple[str, LinearShape]]] = []
    for each in modules.values():
        last = [layer for layer in each if layer.name.rpartition(".")[2] in _ROWWISE]
        first = [layer for layer in each if layer not in last]
        if last and first and any(layer.out == last[0].inner for layer in first):
            found.append([("colwise", layer) for layer in first] + [("rowwise", layer) for layer in last])
            continue
        waiting: LinearShape | None = None
        for layer in each:
            if waiting is not None and waiting.out == layer.inner:
                found.append([("colwise", waiting), ("rowwise", layer)])
                waiting = None
                continue
            if waiting is not None:
                found.append([("colwise", waiting)])
            waiting = layer
        if waiting is not None:
            found.append([("colwise", waiting)])
    return found


def plan_layers(
    layers: list[LinearShape], tokens: int, cluster: Cluster, reduce: str = "exact", graphs: bool = False
) -> list[LayerPlan]:  # fmt: skip
    """Return the style of each layer, tokens cut over ranks outside of a group.

    A group of :func:`group_layers` is cut if that is predicted to be faster than one GPU, exchange included. A layer
    alone is cut by outputs, which are gathered as bfloat16.

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
    graphs : bool, default False
        Calls are in CUDA graphs, whose times the host does not bound.

    Examples
    --------
    >>> up, down = LinearShape("up", 16384, 4096, 0.3), LinearShape("down", 4096, 16384, 0.3)
    >>> [each.style for each in plan_layers([up, down], 8192, CLUSTERS[2], "bfloat16")]
    ['SparseColwise', 'SparseRowwise']
    >>> {each.style for each in plan_layers([up, down], 1, CLUSTERS[64])}
    {'one GPU'}
    """
    found: list[LayerPlan] = []
    ranks = cluster.gpus
    for group in group_layers(layers):
        rows = []
        for style, layer in group:
            sent = traffic(style, layer, tokens, ranks, reduce=reduce)
            seconds = layer_seconds(style, layer, tokens, cluster, reduce=reduce)
            if len(group) == 1 and ranks > 1:
                outputs = sent_bytes("all_gather_into_tensor", 2 * tokens * -(-layer.out // ranks), ranks)
                sent, seconds = sent + outputs, seconds + outputs / cluster.link + cluster.latency
            seconds = max(seconds, cluster.host) if ranks > 1 and not graphs else seconds
            rows.append((style, layer, sent, seconds, layer_seconds(style, layer, tokens, replace(cluster, gpus=1))))
        faster = ranks > 1 and sum(row[3] for row in rows) < sum(row[4] for row in rows)
        for style, layer, sent, seconds, alone in rows:
            found.append(LayerPlan(layer, f"Sparse{style.capitalize()}" if faster else "one GPU", sent, seconds, alone))
    return found
