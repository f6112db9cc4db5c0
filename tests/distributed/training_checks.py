"""What ranks check together of FSDP2, checkpoints, and graphs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import magicube_cutlass as mc
import magicube_cutlass.distributed as md
from magicube_cutlass.distributed.collectives import chunk_bounds
from tests.distributed.checks import generator, model, raises


def mlp(out: int = 24) -> nn.Sequential:
    torch.manual_seed(11)
    made = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, out))
    mc.convert(made, mc.nn.SparseQuantConfig(sparsity=0.75))
    return made


def sharded(
    made: nn.Sequential, mesh: DeviceMesh, stored: bool = True, layers: tuple[int, ...] = (0, 2)
) -> nn.Sequential:
    if stored:
        md.gather_stored(made)
    for i in layers:
        fully_shard(made[i], mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def losses(made: nn.Module, x: Tensor, y: Tensor, steps: int = 4) -> list[float]:
    optimizer, found = torch.optim.AdamW(made.parameters(), lr=3e-2), []
    for _ in range(steps):
        loss = (made(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def mean(values: list[float], mesh: DeviceMesh) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / mesh.size()).tolist()


def check_fsdp_trains_as_one_rank(mesh: DeviceMesh) -> None:
    for out in (24, 18):  # 18 rows do not divide evenly by 4
        x, y = torch.randn(24, 40, generator=generator(1)), torch.randn(24, out, generator=generator(2))
        expected = losses(mlp(out), x, y)
        assert expected[-1] < 0.95 * expected[0]
        if mesh.size() in (1, 2, 4):  # sums of equal gradients over powers of two are exact
            assert losses(sharded(mlp(out), mesh), x, y) == expected
        rank, part = mesh.get_local_rank(), 24 // mesh.size()
        rows = slice(rank * part, (rank + 1) * part)
        found = mean(losses(sharded(mlp(out), mesh), x[rows], y[rows]), mesh)
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=2e-3), (found, expected)


def check_fsdp_without_gather_stored(mesh: DeviceMesh) -> None:
    """FSDP's gathers are hidden from version counters; integers follow them all the same, also without an optimizer."""
    x, y = torch.randn(24, 40, generator=generator(1)), torch.randn(24, 24, generator=generator(2))
    expected = losses(mlp(), x, y)
    for layers in ((0, 2), ()):
        made = sharded(mlp(), mesh, stored=False, layers=layers)
        found = losses(made, x, y)
        assert mesh.size() == 3 or found == expected, (found, expected)
        for stored in (False, True):
            other, made = mlp(), sharded(mlp(), mesh, stored, layers)
            with torch.no_grad():
                made(x)
                made.reshard()
                for parameter in made.parameters():
                    local = parameter.to_local()
                    getattr(local, "_data", local).mul_(-0.5)  # a write that no counter of the gathered weight sees
                for parameter in other.parameters():
                    parameter.mul_(-0.5)
                assert torch.equal(made(x), other(x)), (layers, stored)


def quant_mlp() -> nn.Sequential:
    torch.manual_seed(11)
    made = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 24))
    for i in (0, 2):
        made[i] = mc.nn.QuantLinear.from_linear(made[i])
    return made


def check_cut_layers_learn(mesh: DeviceMesh) -> None:
    """Sparse layers cut by parallel styles learn as one process does; the first forward pass is its, bit for bit."""
    if mesh.size() == 4:  # 12 outputs of 48 on each
        text = raises(ValueError, parallelize_module, mlp(), mesh, {"0": md.SparseColwise()})
        assert text == "outputs must be cut at multiples of vector_length=8 to learn, got a cut at 12"
        return
    cut_layers_learn(mesh, mlp, md.SparseColwise, md.SparseRowwise, 1e-3)


def check_cut_dense_layers_learn(mesh: DeviceMesh) -> None:
    """So do dense ones, whose gradients are float32 products as in one process."""
    cut_layers_learn(mesh, quant_mlp, md.QuantColwise, md.QuantRowwise, 1e-5)


def cut_layers_learn(mesh: DeviceMesh, build: Callable[[], nn.Sequential], first: Any, second: Any, tol: float) -> None:
    x, y = torch.randn(24, 40, generator=generator(1)), torch.randn(24, 24, generator=generator(2))
    given, alone = x.clone().requires_grad_(), build()
    expected_first = alone(given)
    masters = [alone[0].weight, alone[0].bias, alone[2].weight, alone[2].bias]
    expected_grad, *of_masters = torch.autograd.grad((expected_first - y).square().mean(), [given, *masters])
    expected = losses(alone, x, y)
    rank, bounds, hidden = mesh.get_local_rank(), chunk_bounds(24, mesh.size()), chunk_bounds(48, mesh.size())
    rows, own_hidden = slice(bounds[rank], bounds[rank + 1]), slice(hidden[rank], hidden[rank + 1])
    of_masters = [of_masters[0][own_hidden], of_masters[1][own_hidden], of_masters[2][:, own_hidden], of_masters[3]]
    for tokens_cut in (False, True):
        placed = {"input_layouts": Shard(0)} if tokens_cut else {}
        placed_out: dict[str, Any] = {"output_layouts": Shard(0)} if tokens_cut else {}
        made = parallelize_module(build(), mesh, {"0": first(**placed), "2": second(**placed_out)})
        own, wanted = (x[rows], y[rows]) if tokens_cut else (x, y)
        leaf = own.clone().requires_grad_()
        out = made(leaf)
        assert torch.equal(out, expected_first[rows] if tokens_cut else expected_first)
        share = (out - wanted).square().sum() / y.numel()
        found_of = torch.autograd.grad(share, [leaf, made[0].weight, made[0].bias, made[2].weight, made[2].bias])
        references = [expected_grad[rows] if tokens_cut else expected_grad, *of_masters]
        for grad, reference in zip(found_of, references, strict=True):
            assert (grad - reference).norm() < tol * reference.norm(), (tokens_cut, grad.shape)
        optimizer, found = torch.optim.AdamW(made.parameters(), lr=3e-2), []
        for _ in expected:
            loss = (made(own) - wanted).square().sum() / y.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().double()
            if tokens_cut:
                dist.all_reduce(total)
            found.append(float(total))
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=2e-3), (found, expected)
    frozen = parallelize_module(build().eval(), mesh, {"0": first(), "2": second()})
    assert not list(frozen.parameters())
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((frozen(leaf) - y).square().mean(), leaf)
    assert (grad - expected_grad).norm() < tol * expected_grad.norm()
    assert "training mode when" in raises(NotImplementedError, frozen.train(), leaf)


def check_fsdp_gathers_stored_vectors(mesh: DeviceMesh) -> None:
    made, gathered = sharded(mlp(), mesh), []
    before = dist.all_gather_into_tensor

    def counted(output: Tensor, *arguments: Any, **options: Any) -> Any:
        gathered.append(output.numel() * output.element_size())
        return before(output, *arguments, **options)

    patched = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
    saved = {name: getattr(dist, name) for name in patched}
    for name in patched:
        setattr(dist, name, counted)
    try:
        made(torch.randn(3, 40)).sum().backward()
    finally:
        for name, value in saved.items():
            setattr(dist, name, value)
    dense = 4 * (48 * 40 + 24 * 48)
    biases = 4 * (48 + 24)
    # forward and backward each gather a layer once; padding to the rank with most, and the root's bias
    if mesh.size() > 1:
        assert gathered and sum(gathered) < 2 * (0.25 * dense * 1.5 + biases), (gathered, dense)


def check_checkpoint(mesh: DeviceMesh, folder: str) -> list[float]:
    """Save on two ranks, or load what two ranks saved and train on."""
    x, y = torch.randn(24, 40, generator=generator(1)), torch.randn(24, 24, generator=generator(2))
    if not Path(folder, ".metadata").exists() and mesh.size() == 2:
        made = sharded(mlp(), mesh)
        losses(made, x, y)
        dcp.save(get_model_state_dict(made), checkpoint_id=folder)
        return losses(made, x, y, 2)
    torch.manual_seed(99)
    other = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 24))
    mc.convert(other, mc.nn.SparseQuantConfig(sparsity=0.75))
    made = sharded(other, mesh)
    state = get_model_state_dict(made)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(made, state)
    return losses(made, x, y, 2)


def check_save_and_load_here(mesh: DeviceMesh) -> None:
    """A whole state, saved and loaded by as many ranks."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    made = sharded(mlp(), mesh)
    state = get_model_state_dict(made)
    weight = state["0.weight"]
    assert isinstance(weight, DTensor)
    dcp.save(state, checkpoint_id=folder[0])
    again = sharded(mlp(), mesh)
    with torch.no_grad():
        again[0].weight.mul_(0)
    other = get_model_state_dict(again)
    dcp.load(other, checkpoint_id=folder[0])
    set_model_state_dict(again, other)
    x = torch.randn(5, 40, generator=generator(3))
    assert torch.equal(again(x), made(x)) and torch.equal(made(x), mlp()(x))


def check_graphs(mesh: DeviceMesh) -> None:
    """A compiled tensor-parallel model has one graph, with the same collectives and bits."""
    x = torch.randn(12, 40, generator=generator(3))
    rank, part = mesh.get_local_rank(), 12 // mesh.size()
    own = x[rank * part : (rank + 1) * part]
    for build, first, second in (
        (model, md.SparseColwise, md.SparseRowwise),
        (lambda: quant_mlp().eval(), md.QuantColwise, md.QuantRowwise),
    ):
        plan: dict[str, Any] = {
            "0": first(input_layouts=Shard(0), chunks=2), "2": second(output_layouts=Shard(0))}  # fmt: skip
        made = parallelize_module(build(), mesh, plan)
        graphs: list[Any] = []

        def record(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        with torch.no_grad():
            compiled = torch.compile(copy.copy(made), backend=record, fullgraph=True)
            assert torch.equal(compiled(own), made(own))
        assert len(graphs) == 1


DEFAULT = [
    check_fsdp_trains_as_one_rank,
    check_fsdp_without_gather_stored,
    check_cut_layers_learn,
    check_cut_dense_layers_learn,
    check_fsdp_gathers_stored_vectors,
    check_save_and_load_here,
    check_graphs,
]
