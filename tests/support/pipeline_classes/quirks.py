"""What some pipelines hold in their code that keeps them from being tiny, or from running without the network."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from pictured.pipelines import without_videos

_AREAS = ("VAE_IMAGE_SIZE", "CONDITION_IMAGE_SIZE")  # pixels that an edited picture is scaled to
_LARGEST = 32 * 32


class _Guard:
    """Takes the place of Cosmos' safety checker, which is a package of its own, and lets all pass."""

    def to(self, *args: Any, **kwargs: Any) -> _Guard:
        return self

    def check_text_safety(self, text: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


@contextmanager
def small(cls: Any) -> Iterator[None]:
    """Let a pipeline class of diffusers run tiny until the block ends."""
    module: Any = sys.modules[cls.__module__]
    with ExitStack() as exits:
        if importlib.util.find_spec("torchvision") is None:
            exits.enter_context(without_videos())
        for name in _AREAS:
            if hasattr(module, name):
                exits.enter_context(mock.patch.object(module, name, _LARGEST))
        if hasattr(module, "calculate_dimensions"):
            dimensions = module.calculate_dimensions
            exits.enter_context(
                mock.patch.object(module, "calculate_dimensions", lambda area, ratio: dimensions(_LARGEST, ratio))
            )
        if hasattr(module, "CosmosSafetyChecker"):
            exits.enter_context(mock.patch.object(module, "CosmosSafetyChecker", _Guard))
        if "PAG" in cls.__name__ and (taken := inspect.signature(cls.__init__).parameters.get("pag_applied_layers")):
            first = taken.default if str(taken.default)[-2:] != ".1" else "blocks.0"  # of the one block that there is
            exits.enter_context(mock.patch.object(cls, "__init__", _with(cls.__init__, pag_applied_layers=first)))
        if cls.__name__ == "Kandinsky5I2IPipeline":
            exits.enter_context(mock.patch.object(cls, "__init__", _with_resolutions(cls.__init__)))
        yield


@contextmanager
def by_default(cls: Any, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Make the options of a tiny encoder the defaults of the class's call, which are those of the real one."""
    call = inspect.unwrap(cls.__call__)
    encodes = getattr(cls, "encode_prompt", None)
    known = inspect.signature(encodes).parameters if encodes else {}
    told = {name: value for name, value in inputs.items() if name in known and "prompt" not in name}
    defaults = [p for p in inspect.signature(call).parameters.values() if p.default is not p.empty]
    with mock.patch.object(call, "__defaults__", tuple(told.get(p.name, p.default) for p in defaults)):
        yield


def _with(stock: Any, **more: Any) -> Any:
    @functools.wraps(stock)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **more | kwargs)

    return made


def _with_resolutions(stock: Any) -> Any:
    @functools.wraps(stock)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.resolutions = [(64, 64)]

    return made
