"""The one timing function, for the benchmarks; the command line has it, so that an installed package can time too."""

from __future__ import annotations

from magicube_cutlass.bench.timing import Timing, measure

__all__ = ["Timing", "measure"]
