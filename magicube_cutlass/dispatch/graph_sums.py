"""Sums that end a compiled graph, in the epilogue of the int8 GEMM before them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}  # none that changes the dtype


def compile_options() -> dict[str, Any]:
    """Return options of ``torch.compile`` that move sums into the int8 products before them: ``y = q(x) W^T + b + r``.

    A decoder layer that is compiled alone ends in the sum of its MLP's output and its input `r`: a kernel of its own,
    since nothing follows that a compiler could fuse it with. With these options the epilogue of the product adds `r`
    (N, out), of the output's dtype, in float32, and rounds once. Sums that something else in the graph reads are left
    to the compiler, which fuses them with it. On an H200, 30 layers of SmolLM2: see ``docs/lab/models.md``.

    Returns
    -------
    dict
        Options of torch's inductor. Add others, such as ``{"triton.cudagraphs": True}``, to them.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> layer = mc.nn.QuantLinear.from_linear(torch.nn.Linear(64, 64)).eval().freeze()
    >>> layer.compile(options=mc.nn.compile_options())
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class AddInEpilogue(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            add_in_epilogues(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return {"post_grad_custom_post_pass": AddInEpilogue()}


def add_in_epilogues(graph: Graph) -> int:
    """Let products add what their results are added to, where the sum is an output of the graph; return how many."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        if node.kwargs or any(user.op != "output" for user in node.users):
            continue
        for y, other in (node.args, node.args[::-1]):
            found = _product_of(y)
            if found and _fits(y, other):
                _add(graph, node, found, other)
                count += 1
                break
    return count


def _product_of(y: Any) -> list[Node]:
    """A product and its views, `y` the last, if nothing else reads them and nothing follows the sums; or none."""
    found: list[Node] = []
    while isinstance(y, Node) and len(y.users) == 1:
        found.insert(0, y)
        if y.target is torch.ops.magicube.quant_linear_rows.default:
            _, _, _, _, _, out_scale, activation, glu, _, *source = y.args
            return [] if source or y.kwargs or out_scale is not None or activation or glu else found
        if y.target not in _VIEWS:
            break
        y = y.args[0]
    return []


def _fits(y: Any, other: Any) -> bool:
    """Whether an epilogue reads `other` as it is: a tensor of the results' shape and dtype."""
    if not isinstance(other, Node) or other is y:
        return False
    mine, given = y.meta.get("val"), other.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    return bool(mine.dtype == given.dtype and mine.shape == given.shape and mine.device == given.device)


def _add(graph: Graph, total: Node, found: list[Node], other: Node) -> None:
    """Replace a sum by the views of a product that adds `other`."""
    product, columns = found[0], found[0].meta["val"].shape[-1]
    with graph.inserting_before(total):  # behind `other`, which may come after the product
        rows = graph.call_function(_aten.reshape.default, (other, [-1, columns]))  # (N, out)
        rows.meta["val"] = other.meta["val"].reshape(-1, columns)
        y = graph.call_function(product.target, (*product.args, rows))  # type: ignore[arg-type]
        y.meta["val"] = product.meta["val"]
        new = {product: y}
        for view in found[1:]:
            new[view] = graph.node_copy(view, lambda node: new.get(node, node))
    total.replace_all_uses_with(new[found[-1]])
    graph.eliminate_dead_code()
