"""The encoder in ONNX Runtime: its own exporter, and its ``quantize_dynamic`` per channel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 16  # of the example input; the graph takes any number


class _Hidden(nn.Module):
    """Last hidden state alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=input_ids).last_hidden_state
        return found


def onnx_files(dense: nn.Module, folder: Path) -> dict[str, Path]:
    """Files of the model in float32 and int8 by name; empty where the packages are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")):
        return {}
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain, small = folder / "float32.onnx", folder / "int8.onnx"
    ids = torch.ones(2, TOKENS, dtype=torch.int64)
    shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}}
    torch.onnx.export(
        _Hidden(dense).eval(), (ids,), str(plain), dynamo=True, dynamic_shapes=shapes, external_data=False
    )
    quantize_dynamic(plain, small, per_channel=True, weight_type=QuantType.QInt8)
    return {"ONNX Runtime float32": plain, "ONNX Runtime int8": small}


def onnx_session(path: Path, threads: int) -> Any:
    """A session on so many threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_session(session: Any, ids: Tensor) -> Tensor:
    """Hidden states (batch, tokens, width)."""
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: ids.numpy()})[0])


class SessionModel(nn.Module):
    """A session that is called as the model is."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=run_session(self.session, input_ids))
