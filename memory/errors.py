"""What can go wrong with memory, and how torch says it."""

from __future__ import annotations

import traceback

import torch

# Of CUDA's libraries too, which say other things when it is their workspace that does not fit.
_OUT_OF_MEMORY = (
    "out of memory",
    "alloc_failed",
    "allocation_failed",
    "out_of_device_memory",
    "out_of_host_memory",
    "unable to find an engine",
    "unable to find a valid cudnn",
    "when calling `cublascreate",
    "when calling cublascreate",
)


class DoesNotFitError(RuntimeError):
    """A unit fits the budget in no placement. The message names the bytes, the budget and what could be freed."""

    __module__ = "ballast"  # the host shows it, and would show its own path of the pack in three lines


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device is out of memory, in the words of any backend."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, DoesNotFitError):  # which tells that all was tried
        return False
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def release_frames(error: BaseException) -> None:
    """Let go of the tensors that the frames of a caught error, and of those that led to it, still hold."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
