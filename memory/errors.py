"""What can go wrong with memory, and how torch says it."""

from __future__ import annotations

import traceback

import torch


class DoesNotFitError(RuntimeError):
    """A unit fits the budget in no placement. The message names the bytes, the budget and what could be freed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device is out of memory, in the words of any backend."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, DoesNotFitError):  # which tells that all was tried
        return False
    # The second is what CUDA's libraries say when their workspace does not fit.
    return isinstance(error, RuntimeError) and any(s in str(error).lower() for s in ("out of memory", "alloc_failed"))


def release_frames(error: BaseException) -> None:
    """Let go of the tensors that the frames of a caught error, and of those that led to it, still hold."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
