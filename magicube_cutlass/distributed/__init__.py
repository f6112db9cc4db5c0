"""Sparse products over several processes, on torch.distributed: integers travel, and results equal one process's.

Import it by name: ``import magicube_cutlass.distributed``; the package itself does not.
"""

from magicube_cutlass.distributed.attention import sparse_attention
from magicube_cutlass.distributed.collectives import init_mesh
from magicube_cutlass.distributed.fsdp import SparseMaster, gather_stored
from magicube_cutlass.distributed.parallel import (
    QuantColwise,
    QuantRowwise,
    SparseColwise,
    SparseRowwise,
)
from magicube_cutlass.distributed.products import sddmm, spmm
from magicube_cutlass.distributed.sharded import ShardedMatrix, shard, unshard
from magicube_cutlass.distributed.sharded_linear import ShardedLinear
from magicube_cutlass.distributed.wire import WireBytes

__all__ = [
    "QuantColwise",
    "QuantRowwise",
    "ShardedLinear",
    "ShardedMatrix",
    "SparseColwise",
    "SparseMaster",
    "SparseRowwise",
    "WireBytes",
    "gather_stored",
    "init_mesh",
    "sddmm",
    "shard",
    "sparse_attention",
    "spmm",
    "unshard",
]
