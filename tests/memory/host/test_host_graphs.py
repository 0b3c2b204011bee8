"""CUDA graphs that the host has captured hold the addresses of cuBLAS's workspaces: these stay as long as it may."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ballast.memory.accelerator import Accelerator
from ballast.memory.host.flags import host_flags


def host(monkeypatch: pytest.MonkeyPatch, streams: dict[Any, Any] | None, **options: bool) -> None:
    monkeypatch.setitem(sys.modules, "comfy.cli_args", SimpleNamespace(args=SimpleNamespace(**options)))  # type: ignore[arg-type]
    prefetch = None if streams is None else SimpleNamespace(GRAPH_CAPTURE_STREAMS=streams)
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", prefetch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("streams", "options", "stay"),
    [
        (None, {}, False),  # a version without graphs
        ({}, {"disable_cuda_graphs": False}, False),
        ({"cuda:0": object()}, {"disable_cuda_graphs": False}, True),
        ({"cuda:0": object()}, {"disable_cuda_graphs": True}, False),
        (None, {"disable_cuda_graphs": False}, True),  # one that keeps its streams elsewhere
    ],
)
def test_workspaces_stay_where_the_host_has_captured_graphs(
    streams: dict[Any, Any] | None, options: dict[str, bool], stay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, streams, **options)
    assert host_flags().graphs == stay
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False)
    card = Accelerator.__new__(Accelerator)
    card.device, card.is_cpu, card._module = torch.device("cuda", 0), False, ModuleType("cuda")
    card._module.empty_cache = lambda: done.append("cache")  # type: ignore[attr-defined]
    card.empty_cache()
    assert done == (["cache"] if stay else ["workspaces", "cache"])
