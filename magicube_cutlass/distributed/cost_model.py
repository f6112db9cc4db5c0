"""Bytes and time of tensor-parallel linear layers: no tensors, no torch.

A layer (out, in) of density d on n GPUs: the product's time falls with n, and what it exchanges is added. Bytes are
those that a rank sends, by rings; ``WireBytes`` counts the same on 1 to 4 processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["CLUSTERS", "Cluster", "LayerPlan", "LinearShape", "group_layers", "plan_layers", "sent_bytes", "traffic"]

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
    memory, sparse_rate, dense_rate, launch : float
        Of a GPU: bytes per second that a product reads, int8 operations per second of sparse and dense products, and
        seconds that a launch takes at least. Fitted to ``benchmarks/results/llm_h200.json`` (0.7 and 0.9 zeros).
    host : float
        Seconds of host time of a layer whose tokens are cut, below which it takes no less time: 1.9 ms for two layers
        of 256 tokens on two H100s, ``distributed_nccl_2.json``.
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
    memory: float = 2.5e12
    sparse_rate: float = 0.25e15
    dense_rate: float = 1.2e15
    launch: float = 4e-6
    host: float = 0.95e-3
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
    """Return the time of a rank's product: a launch, and operations or memory, whichever takes longer."""
    stored = layer.out * layer.inner * layer.density / ranks
    rate = cluster.dense_rate if layer.density == 1 else cluster.sparse_rate
    index = 0.0 if layer.density == 1 else 0.5  # bytes per stored element: a column index for 8 of them
    moved = stored * (layer.bits / 8 + index) + tokens * (layer.inner + 2 * layer.out / ranks)
    return cluster.launch + max(2 * stored * tokens / rate, moved / cluster.memory)


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
    layers: list[LinearShape], tokens: int, cluster: Cluster, reduce: str = "exact"
) -> list[LayerPlan]:  # fmt: skip
    """Return the style of each layer, tokens cut over ranks outside of a group.

    A group of :func:`group_layers` is cut if that is predicted to be faster than one GPU, exchange included. A layer
    alone is cut by outputs, which are gathered as bfloat16. Passes over sums and activations are left out.

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
            sent, steps = traffic(style, layer, tokens, ranks, reduce=reduce), ranks - 1
            if len(group) == 1:
                sent += sent_bytes("all_gather_into_tensor", 2 * tokens * -(-layer.out // ranks), ranks)
            if style == "rowwise" or len(group) == 1:
                steps *= 2
            seconds = product_seconds(layer, tokens, ranks, cluster) + sent / cluster.link + steps * cluster.latency
            seconds = max(seconds, cluster.host) if ranks > 1 else seconds
            rows.append((style, layer, sent, seconds, product_seconds(layer, tokens, 1, cluster)))
        faster = ranks > 1 and sum(row[3] for row in rows) < sum(row[4] for row in rows)
        for style, layer, sent, seconds, alone in rows:
            found.append(LayerPlan(layer, f"Sparse{style.capitalize()}" if faster else "one GPU", sent, seconds, alone))
    return found
