"""Stand-in for `comfy_api.latest`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from comfy_execution.utils import get_executing_context

from . import _io as io
from . import _ui as ui

IO = io
UI = ui


@dataclass
class _VideoComponents:
    images: Any
    frame_rate: Fraction
    audio: Any = None
    metadata: dict | None = None
    alpha: Any = None


class _VideoFromComponents:
    def __init__(self, components: _VideoComponents, bit_depth: int = 8) -> None:
        self.components = components

    def get_components(self) -> _VideoComponents:
        return self.components


class InputImpl:
    VideoFromComponents = _VideoFromComponents


class Types:
    VideoComponents = _VideoComponents


class ComfyExtension(ABC):
    async def on_load(self) -> None:
        return None

    @abstractmethod
    async def get_node_list(self) -> list[type[io.ComfyNode]]: ...


class _Execution:
    """Keeps the progress reports in `calls` as (node id, value, max value, preview)."""

    calls: list[tuple[str, float, float, Any]] = []

    def record(self, value: float, max_value: float, node_id: str | None, preview: Any) -> None:
        context = get_executing_context()
        if node_id is None and context is not None:
            node_id = context.node_id
        if node_id is None:
            raise ValueError("set_progress outside of a running node needs node_id")
        self.calls.append((node_id, value, max_value, preview))


class _ExecutionAsync(_Execution):
    async def set_progress(
        self,
        value: float,
        max_value: float,
        node_id: str | None = None,
        preview_image: Any = None,
        ignore_size_limit: bool = False,
    ) -> None:
        self.record(value, max_value, node_id, preview_image)


class _ExecutionSync(_Execution):
    def set_progress(
        self,
        value: float,
        max_value: float,
        node_id: str | None = None,
        preview_image: Any = None,
        ignore_size_limit: bool = False,
    ) -> None:
        self.record(value, max_value, node_id, preview_image)


class ComfyAPI:
    VERSION = "latest"
    STABLE = False

    def __init__(self) -> None:
        self.execution = _ExecutionAsync()


class ComfyAPISync:
    VERSION = "latest"
    STABLE = False

    def __init__(self) -> None:
        self.execution = _ExecutionSync()


__all__ = ["ComfyAPI", "ComfyAPISync", "ComfyExtension", "IO", "UI", "io", "ui"]
