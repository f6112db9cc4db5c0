"""Pruning that keeps a model: V x 1 vectors by data, least-squares refit, allocation over layers, distillation."""

from magicube_cutlass.pruning.allocation import allocate, predicted_us, row_sensitivity
from magicube_cutlass.pruning.distill import DistillReport, distill
from magicube_cutlass.pruning.distill_loss import LossWeights
from magicube_cutlass.pruning.embedding import mean_embedding
from magicube_cutlass.pruning.model import PruneReport, PruneRow, PruningWarning, prune_model
from magicube_cutlass.pruning.search import AllocationTrial, fastest_allocation
from magicube_cutlass.pruning.solve import obs, refit, vector_scores
from magicube_cutlass.pruning.statistics import InputStatistics
from magicube_cutlass.pruning.walk import find_blocks, token_mask

__all__ = [
    "AllocationTrial",
    "DistillReport",
    "InputStatistics",
    "LossWeights",
    "PruneReport",
    "PruneRow",
    "PruningWarning",
    "allocate",
    "distill",
    "fastest_allocation",
    "find_blocks",
    "mean_embedding",
    "obs",
    "predicted_us",
    "prune_model",
    "refit",
    "row_sensitivity",
    "token_mask",
    "vector_scores",
]
