"""The calls whose launches ``launch_log.json`` holds; ``launch_recorder`` records them.

Their numbers are integers, or floats made of integers, so that copies made on the host are the same on every machine.
"""

from __future__ import annotations

from tests.kernels import launch_cases_attention, launch_cases_dense, launch_cases_quantize, launch_cases_sparse
from tests.kernels.launch_fakes import MACHINES
from tests.kernels.launch_recorder import Recorder


def record(recorder: Recorder) -> None:
    """All calls, for each kind of GPU."""
    for arch in MACHINES:
        with recorder.on(arch):
            for family in (launch_cases_sparse, launch_cases_dense, launch_cases_quantize, launch_cases_attention):
                family.record(recorder)
