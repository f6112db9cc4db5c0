"""Second moments of the inputs of a layer, summed over batches of calibration data."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["InputStatistics"]

_TOKENS = 4096  # that wait for one product


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class InputStatistics:
    """Moments of a layer's input ``x`` and of the dense model's input ``x_dense`` of the same tokens.

    ``gram = E[x x^T]``, ``cross = E[x_dense x^T]`` and the means, over all tokens added; sums in float64.

    Parameters
    ----------
    features : int
        K, the inputs of the layer.
    device : torch.device or str, default "cpu"
        Device of the sums.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import InputStatistics
    >>> found = InputStatistics(2)
    >>> found.add(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
    >>> found.gram.tolist(), found.mean.tolist()
    ([[1.0, 1.0], [1.0, 2.0]], [1.0, 1.0])
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._gram = torch.zeros(features, features, dtype=torch.float64, device=device)
        self._sum = self._gram.new_zeros(features)
        self._cross, self._dense_sum = self._gram, self._sum  # tensors of their own with the first x_dense
        self._waiting: list[tuple[Tensor, Tensor | None]] = []

    def add(self, x: Tensor, x_dense: Tensor | None = None) -> None:
        """Add the tokens of a batch, shape (..., K); `x_dense`: the dense model's, default `x`.

        All batches have `x_dense` or none has.
        """
        x = x.detach().reshape(-1, x.shape[-1])  # (tokens, K)
        if x_dense is not None:
            x_dense = x_dense.detach().reshape(-1, x_dense.shape[-1])
            if x_dense.shape != x.shape:
                raise ValueError(f"x_dense must have shape {tuple(x.shape)} like x, got {tuple(x_dense.shape)}")
        if self.tokens and (x_dense is None) != (self._cross is self._gram):
            raise ValueError("x_dense must be given for all batches or for none")
        if x_dense is not None and self._cross is self._gram:
            self._cross, self._dense_sum = torch.zeros_like(self._gram), torch.zeros_like(self._sum)
        self.tokens += len(x)
        self._waiting.append((x, x_dense))
        if sum(len(each) for each, _ in self._waiting) >= _TOKENS:
            self._flush()

    def _flush(self) -> None:
        """Add what waits to the sums: one product of many tokens is faster than many of few."""
        if not self._waiting:
            return
        x = _wide(torch.cat([each for each, _ in self._waiting]))  # (tokens, K)
        self._gram += x.T @ x
        self._sum += x.sum(0)
        if self._cross is not self._gram:
            dense = _wide(torch.cat([each for _, each in self._waiting if each is not None]))
            self._cross += dense.T @ x
            self._dense_sum += dense.sum(0)
        self._waiting.clear()

    def _mean(self, total: Tensor) -> Tensor:
        self._flush()
        if not self.tokens:
            raise ValueError("statistics must have at least one token, got none")
        return total / self.tokens

    @property
    def gram(self) -> Tensor:
        """``E[x x^T]``, float64 (K, K)."""
        return self._mean(self._gram)

    @property
    def cross(self) -> Tensor:
        """``E[x_dense x^T]``, float64 (K, K)."""
        return self._mean(self._cross)

    @property
    def mean(self) -> Tensor:
        """``E[x]``, float64 (K,)."""
        return self._mean(self._sum)

    @property
    def dense_mean(self) -> Tensor:
        """``E[x_dense]``, float64 (K,)."""
        return self._mean(self._dense_sum)
