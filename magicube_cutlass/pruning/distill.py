"""Distillation: training of a pruned model towards the dense one, on unlabelled data."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.pruning.distill_loss import LossWeights, Teacher, losses
from magicube_cutlass.pruning.embedding import Embed, mean_embedding
from magicube_cutlass.pruning.walk import Batch, evaluation, find_blocks

__all__ = ["DistillReport", "distill"]

_EVERY = 20  # steps between two records of the loss


@dataclass
class DistillReport:
    """Result of ``distill``.

    Attributes
    ----------
    step : int
        Steps that are done, those of an earlier run included.
    steps : int
        Steps of the schedule.
    seconds : float
        Time of the steps, those of an earlier run included, evaluations not counted.
    cpu_seconds : float
        Likewise, time of the processors, summed over the threads.
    history : list of dict
        ``{"step": ..., "seconds": ..., ...}``: the mean ``"loss"`` of the last 20 steps, or what `evaluate` gave.

    Examples
    --------
    >>> from magicube_cutlass.pruning import DistillReport
    >>> DistillReport(10, 20).is_finished
    False
    """

    step: int
    steps: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the schedule are done."""
        return self.step >= self.steps


def distill(
    student: nn.Module,
    teacher: nn.Module,
    data: Sequence[Batch],
    *,
    steps: int,
    lr: float = 4e-4,
    weights: LossWeights | None = None,
    embed: Embed | None = None,
    warmup: int = 30,
    keep_zeros: bool = True,
    freeze: Callable[[str, nn.Parameter], bool] | None = None,
    autocast: torch.dtype | None = None,
    cache_bytes: int = 2**31,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 200,
    seconds: float | None = None,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    evaluate_every: int = 500,
    seed: int = 0,
    progress: bool = True,
) -> DistillReport:
    """Train a pruned model, in place, to give the hidden states and outputs of the dense model it comes from.

    Loss: ``a mean_l |h_l - t_l|^2 / var(t_l) + b (1 - cos(e, e_t)) + c mean |E E^T - E_t E_t^T|^2 + d KL(p_t | p)``,
    with h_l and t_l the outputs of block l of student and teacher [1]_, e the embeddings, E those of the batch, p the
    softmax of the logits; a, b, c, d as in ``LossWeights``. AdamW without decay; the rate rises over `warmup`
    steps and falls to 2% along a cosine. Weights of ``nn.Linear`` layers that are 0 stay 0. The order of the batches
    follows from `seed` and the step, so a run that goes on from `checkpoint` ends with the weights of a whole one.

    Parameters
    ----------
    student, teacher : nn.Module
        Of equal blocks, see ``find_blocks``. The teacher runs without gradients.
    data : sequence
        Batches: tensors, tuples or lists whose first entry is the input, or dicts of keyword arguments; moved to the
        device of the student.
    steps : int
        Steps of the whole schedule.
    lr : float, default 4e-4
        Largest rate.
    weights : LossWeights, optional
        Default: hidden states 1, embeddings 3, similarities 10, logits 0.
    embed : callable, optional
        From the output and the batch to a vector per sample; default ``mean_embedding``.
    warmup : int, default 30
    keep_zeros : bool, default True
        Keep the masks of a pruned model.
    freeze : callable, optional
        From name and parameter to whether it is not trained. Default: those of ``nn.Embedding`` modules are not.
    autocast : torch.dtype, optional
        16-bit float for the products of both models; pays on a CPU or GPU with instructions for it.
    cache_bytes : int, default 2 GiB
        Memory for states of the teacher, which are then not computed again.
    checkpoint : path, optional
        File from which the run goes on if it is there, and which is written every `save_every` steps and at the end.
    seconds : float, optional
        Stop after this time, with a checkpoint; the schedule stays that of `steps`.
    evaluate : callable, optional
        From the model, in evaluation mode, to numbers by name, every `evaluate_every` steps and at the end.
    seed : int, default 0
    progress : bool, default True
        Show a progress bar.

    Returns
    -------
    DistillReport

    Raises
    ------
    ValueError
        For no data, or a checkpoint of a run with other options.

    References
    ----------
    .. [1] Sun, Cheng, Gan, Liu, arXiv 1908.09355 (hidden states); Tung, Mori, arXiv 1907.09682 (similarities).

    Examples
    --------
    >>> import copy, torch, magicube_cutlass as mc
    >>> dense = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    >>> model, data = copy.deepcopy(dense), [torch.randn(64, 32) for _ in range(4)]
    >>> report = mc.prune_model(model, 0.5, data, allocation="uniform", progress=False)
    >>> mc.distill(model, dense, data, steps=5, progress=False).is_finished
    True
    >>> int((model[0].weight == 0).sum())
    512
    """
    if not len(data):
        raise ValueError("data must hold at least one batch, got none")
    trained, weights, embed = _trained(student, freeze), weights or LossWeights(), embed or mean_embedding
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True)
    options = {"steps": steps, "lr": lr, "seed": seed, "batches": len(data), "warmup": warmup, **asdict(weights)}
    report = DistillReport(0, steps)
    run = _Run(student, optimizer, trained, report, options, Path(checkpoint) if checkpoint is not None else None)
    run.load()
    if keep_zeros:
        run.masks = _masks(trained, student)
    shown = _bar(steps, report.step) if progress else None
    before, clock = report.seconds, _Clock(report)
    with run.training(), evaluation(teacher), evaluation(student), shown or nullcontext():
        source, blocks = Teacher(teacher, embed, cache_bytes), list(find_blocks(student).values())
        while report.step < steps:
            index = _place(report.step, len(data), seed)
            batch = _moved(data[index], run.device)
            with nullcontext() if autocast is None else torch.autocast(run.device.type, autocast):
                loss = losses(student, blocks, batch, source(index, batch), embed, weights)
            run.step(loss, lr * _rate(report.step, steps, warmup))
            clock.read()
            is_last = report.step == steps
            if report.step % _EVERY == 0 or is_last:
                run.note(shown)
            if evaluate is not None and (report.step % evaluate_every == 0 or is_last):
                with torch.no_grad(), clock.paused():
                    report.history.append({"step": report.step, "seconds": report.seconds, **evaluate(student)})
            is_late = seconds is not None and report.seconds - before > seconds
            if report.step % save_every == 0 or is_last or is_late:
                run.save()
            if is_late:
                break
    return report


class _Clock:
    """Time of the steps, added to a report."""

    def __init__(self, report: DistillReport) -> None:
        self.report, self.before = report, _now()

    def read(self) -> None:
        """Add the time since the last call."""
        now = _now()
        self.report.seconds += now[0] - self.before[0]
        self.report.cpu_seconds += now[1] - self.before[1]
        self.before = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside."""
        self.read()
        yield
        self.before = _now()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


@dataclass
class _Run:
    """What a checkpoint holds."""

    student: nn.Module
    optimizer: torch.optim.Optimizer
    trained: list[nn.Parameter]
    report: DistillReport
    options: dict[str, float]
    path: Path | None
    masks: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    recent: list[Tensor] = field(default_factory=list)  # losses since the last note

    @property
    def device(self) -> torch.device:
        return self.trained[0].device

    @contextmanager
    def training(self) -> Iterator[None]:
        """Gradients of the trained parameters only; restored at the end."""
        needed = {each: each.requires_grad for each in self.student.parameters()}
        for each in needed:
            each.requires_grad_(False)
        for each in self.trained:
            each.requires_grad_(True)
        try:
            yield
        finally:
            for each, before in needed.items():
                each.requires_grad_(before)

    def step(self, loss: Tensor, rate: float) -> None:
        """One step of the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for weight, mask in self.masks.items():
            if weight.grad is not None:
                weight.grad.mul_(mask)
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.recent.append(loss.detach())
        self.report.step += 1

    def note(self, shown: Any) -> None:
        """Add the mean loss to the history and the bar."""
        mean = float(torch.stack(self.recent).mean())
        self.recent.clear()
        self.report.history.append({"step": self.report.step, "seconds": self.report.seconds, "loss": mean})
        if shown is not None:
            shown.update(shown.task_ids[0], completed=self.report.step, loss=f"{mean:.4f}")

    def load(self) -> None:
        if self.path is None or not self.path.is_file():
            return
        state = torch.load(self.path, map_location=self.device, weights_only=True)
        other = {key for key in self.options | state["options"] if self.options.get(key) != state["options"].get(key)}
        if other:
            raise ValueError(
                f"checkpoint must be of a run with equal options, got another {', '.join(sorted(other))}; remove "
                f"{self.path} to start again"
            )
        self.student.load_state_dict(state["student"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.report.step, self.report.seconds = state["step"], state["seconds"]
        self.report.cpu_seconds = state.get("cpu_seconds", 0.0)
        self.report.history[:] = state["history"]

    def save(self) -> None:
        if self.path is None:
            return
        state = {
            "options": self.options, "student": self.student.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.report.step, "seconds": self.report.seconds,
            "cpu_seconds": self.report.cpu_seconds, "history": self.report.history,
        }  # fmt: skip
        part = self.path.with_name(self.path.name + ".part")
        torch.save(state, part)
        part.replace(self.path)  # whole or not at all


def _trained(student: nn.Module, freeze: Callable[[str, nn.Parameter], bool] | None) -> list[nn.Parameter]:
    if freeze is None:
        tables = {id(each.weight) for each in student.modules() if isinstance(each, nn.Embedding)}

        def freeze(name: str, parameter: nn.Parameter) -> bool:
            return id(parameter) in tables

    found = [each for name, each in student.named_parameters() if each.is_floating_point() and not freeze(name, each)]
    if not found:
        raise ValueError("student must have parameters to train, got none")
    return found


def _masks(trained: list[nn.Parameter], student: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Nonzero entries of the trained weights of linear layers that have zeros."""
    weights = {id(each.weight) for each in student.modules() if isinstance(each, nn.Linear)}
    found = {each: each.detach() != 0 for each in trained if id(each) in weights}
    return {each: mask for each, mask in found.items() if not bool(mask.all())}


def _place(step: int, batches: int, seed: int) -> int:
    """Batch of a step: each epoch is an order of its own."""
    epoch, at = divmod(step, batches)
    return int(_order(epoch, batches, seed)[at])


_orders: dict[tuple[int, int, int], Tensor] = {}


def _order(epoch: int, batches: int, seed: int) -> Tensor:
    key = (epoch, batches, seed)
    if key not in _orders:
        _orders.clear()
        _orders[key] = torch.randperm(
            batches, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch), device="cpu"
        )
    return _orders[key]


def _rate(step: int, steps: int, warmup: int) -> float:
    return min(1.0, (step + 1) / max(warmup, 1)) * max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))


def _moved(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _moved(each, device) for key, each in batch.items()}
    return type(batch)(_moved(each, device) for each in batch) if isinstance(batch, (tuple, list)) else batch


def _bar(steps: int, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("distillation", BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.add_task("distillation", total=steps, completed=done, loss="")
    return bar
