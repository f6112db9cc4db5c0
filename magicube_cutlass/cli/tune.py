"""``magicube tune``: constants of kernel selection, measured on this GPU."""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

from magicube_cutlass.cli.console import output


def tune(
    cases: Annotated[
        int, typer.Option(min=8, help="Shapes to fit the constants to, and as many to judge them by.")
    ] = 40,
    reset: Annotated[bool, typer.Option("--reset", help="Forget what was measured on this GPU.")] = False,
) -> None:
    """Measure what the choice of an SpMM kernel needs to know of this GPU, and keep it for this user.

    Without it the constants of an H200 are used.  New constants are kept only if they choose better than the present
    ones on shapes that they were not fitted to.
    """
    if not torch.cuda.is_available():
        raise typer.BadParameter("tune needs a CUDA device, and torch finds none")
    from cute_kernels import jit
    from magicube_cutlass import tuning
    from magicube_cutlass.dispatch.machine import get_machine

    device, console = torch.cuda.get_device_name(), Console(stderr=True)
    if reset:
        there = tuning.forget(device)
        get_machine.cache_clear()
        output().print(f"forgot what was measured on {device}" if there else f"nothing was measured on {device}")
        return
    machine = get_machine(torch.cuda.current_device())
    configs = tuning.wanted(cases, machine)
    for _ in track(
        jit.warmup(configs, machine.arch, min(os.cpu_count() or 1, 16)), "compiling", len(configs), console=console
    ):
        pass
    fitted_to, held_out = (
        list(track(tuning.measure(cases, seed, machine), f"timing {seed} of 2", cases, console=console))
        for seed in (1, 2)
    )
    found = tuning.fit(fitted_to, machine)
    before, after = tuning.judge(held_out, machine), tuning.judge(held_out, found)
    output().print(f"present constants: {before}\nnew constants: {after}")
    if (after.near, -after.worst) > (before.near, -before.worst):
        tuning.save(device, found)
        get_machine.cache_clear()
        output().print(f"the new constants are used on {device} from now on")
    else:
        output().print("the present constants stay")
