"""A sparse quantized MLP over several processes: integers travel, and the result equals that of one process.

Two layers are converted, cut by ``SparseColwise`` and ``SparseRowwise``, and run with tokens on all ranks and with
tokens cut over ranks. Every row of the table is compared with one process. NCCL where each process has a GPU, else
gloo.
Run: ``torchrun --nproc-per-node 2 examples/distributed_mlp.py [--quick]``; without torchrun it is one process.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import magicube_cutlass as mc
from magicube_cutlass.distributed import SparseColwise, SparseRowwise, WireBytes, init_mesh

PLANS: dict[str, dict[str, Any]] = {
    "tokens on all ranks": {"0": SparseColwise(), "2": SparseRowwise(use_local_output=False)},
    "tokens cut, exact": {
        "0": SparseColwise(input_layouts=Shard(0)),
        "2": SparseRowwise(output_layouts=Shard(0), use_local_output=False),
    },
    "tokens cut, 2 chunks, bfloat16 sums": {
        "0": SparseColwise(input_layouts=Shard(0), chunks=2),
        "2": SparseRowwise(output_layouts=Shard(0), reduce="bfloat16", use_local_output=False),
    },
    "tokens cut, int8 sums": {
        "0": SparseColwise(input_layouts=Shard(0)),
        "2": SparseRowwise(output_layouts=Shard(0), reduce="int8", use_local_output=False),
    },
}


def build(width: int, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    """The converted model, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)).to(device, dtype).eval()
    mc.convert(model, mc.nn.SparseQuantConfig(sparsity=0.8))
    return model


def milliseconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Best time of a call on this rank, all ranks started together."""
    best = float("inf")
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, 1e3 * (time.perf_counter() - begin))
    return best


@torch.no_grad()
def compare(mesh: DeviceMesh, width: int, tokens: int, rounds: int) -> list[list[str]]:
    """Rows of the table."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(width, device, dtype)
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1), device="cpu").to(device, dtype)
    expected: Tensor = model(x)
    alone = milliseconds(partial(model, x), device, rounds)
    rows = [["one process", "0", f"{alone:.3f}", "1.00", "equal"]]
    for name, plan in PLANS.items():
        made = parallelize_module(copy.deepcopy(model), mesh, plan)
        given = distribute_tensor(x, mesh, [Shard(0) if "cut" in name else Replicate()], src_data_rank=None)
        with WireBytes() as wire:
            found = made(given if "cut" in name else x)
        assert isinstance(found, DTensor)
        whole = found.full_tensor()
        error = float((whole.float() - expected.float()).norm() / expected.float().norm())
        equal = torch.tensor([float(torch.equal(whole, expected))], device=device)
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        spent = milliseconds(partial(made, given if "cut" in name else x), device, rounds)
        state = "equal" if equal.item() else f"error {error:.1e}"
        rows.append([name, str(wire.total), f"{spent:.3f}", f"{alone / spent:.2f}", state])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where each process has a GPU")
    args = parser.parse_args()
    mesh = init_mesh(args.device)
    big = mesh.device_type == "cuda" and not args.quick
    width, tokens = (4096, 8192) if big else (96, 24)
    rows = compare(mesh, width, tokens, rounds=10 if big else 2)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} processes, {dist.get_backend()}, {mesh.device_type}, width {width}, {tokens} tokens")
        for row in [["plan", "bytes a rank sends", "ms", "times one process", "result"], *rows]:
            print(f"{row[0]:<38}{row[1]:>20}{row[2]:>12}{row[3]:>20}  {row[4]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
