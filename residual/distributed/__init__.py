"""Dense products with a chosen error over several processes: one tolerance for all ranks, on torch.distributed.

Import it by name: ``import residual.distributed``; the package itself does not.
"""

from residual.distributed.matmul import matmul
from residual.distributed.parallel import ResidualColwise, ResidualRowwise, ShardedResidualLinear
from residual.distributed.tall import lstsq, qr, solve

__all__ = ["ResidualColwise", "ResidualRowwise", "ShardedResidualLinear", "lstsq", "matmul", "qr", "solve"]
