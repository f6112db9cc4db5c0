"""``magicube tune``: constants of kernel selection, measured on this GPU."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from magicube_cutlass.cli.arguments import Json, print_json
from magicube_cutlass.cli.console import output


def tune(
    cases: Annotated[int, typer.Option(min=8, help="Shapes for the fit, and as many for its test.")] = 40,
    reset: Annotated[bool, typer.Option("--reset", help="Remove the stored constants of this GPU.")] = False,
    as_json: Json = False,
) -> None:
    """Fit the cost models of SpMM kernel selection to this GPU and store them for this user.

    The default constants are those of an H200. New constants are stored only if they select better than the present
    ones on shapes to which they were not fitted.
    """
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("tune needs a CUDA device, and torch finds none")
    from rich.console import Console
    from rich.progress import track

    from cute_kernels import jit
    from magicube_cutlass import tuning
    from magicube_cutlass.dispatch.machine import forget_models, get_machine, save_models

    device, console = torch.cuda.get_device_name(), Console(stderr=True)
    if reset:
        there = forget_models(device)
        get_machine.cache_clear()
        if as_json:
            print_json({"device": device, "removed": bool(there)})
            return
        output().print(f"removed the constants of {device}" if there else f"no constants are stored for {device}")
        return
    machine = get_machine(torch.cuda.current_device())
    configs = tuning.wanted(cases, machine)
    for _ in track(
        jit.warmup(configs, machine.arch, min(os.cpu_count() or 1, 16)), "compiling", len(configs), console=console
    ):
        pass
    fitted_to, held_out = (
        list(track(tuning.time_cases(cases, seed, machine), f"timing {seed} of 2", cases, console=console))
        for seed in (1, 2)
    )
    found = tuning.fit(fitted_to, machine)
    before, after = tuning.judge(held_out, machine), tuning.judge(held_out, found)
    is_better = (after.near, -after.worst) > (before.near, -before.worst)
    if is_better:
        save_models(device, found)
        get_machine.cache_clear()
    if as_json:
        print_json({"device": device, "present": asdict(before), "new": asdict(after), "stored": is_better})
        return
    output().print(f"present constants: {before}\nnew constants: {after}")
    stored = f"the new constants are stored for {device}" if is_better else "the present constants remain"
    output().print(stored)
