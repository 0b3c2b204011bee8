"""The errors of memory, and the ways in which torch and its libraries report them."""

from __future__ import annotations

import errno
import opcode
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType, FunctionType, TracebackType
from typing import Any

import torch

# Includes the words of CUDA's and ROCm's libraries for a workspace of theirs that does not fit.
_OUT_OF_MEMORY = (
    "out of memory",
    "alloc_failed",
    "allocation_failed",
    "out_of_device_memory",
    "out_of_host_memory",
    "out_of_resources",
    "miopenstatusallocfailed",
    "unable to find an engine",
    "unable to find a valid cudnn",
    "when calling `cublascreate",
    "when calling cublascreate",
)
# From torch's allocator on Linux and Windows, and from libraries that exceed the page file of Windows.
_OUT_OF_RAM = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "os error 1455",
)
_COMMITMENT_LIMIT = 1455  # Windows' error number for a page file that is too small

_NO_OPERATION = bytes([opcode.opmap["NOP"]])
_OF_MODULE: tuple[str, ...] = ("__name__", "__loader__", "__spec__")  # globals by which Python finds a source line


class DoesNotFitError(RuntimeError):
    """A unit fits the budget in no placement. The message names the bytes, the budget and what could be freed."""

    __module__ = "ballast"  # the host shows this name: its own path of the pack would take three lines


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device is out of memory, in the words of any backend.

    False for a DoesNotFitError: it is raised after all fallbacks have been tried.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, DoesNotFitError):
        return False
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def is_out_of_ram(error: BaseException) -> bool:
    """Return whether an error means that the system refuses RAM. The unit may then still run from disk."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and (error.errno == errno.ENOMEM or _winerror(error) == _COMMITMENT_LIMIT):
        return True
    return isinstance(error, Exception) and any(words in str(error).lower() for words in _OUT_OF_RAM)


def _winerror(error: OSError) -> int | None:
    return getattr(error, "winerror", None)  # only Windows has it


def release_frames(error: BaseException) -> None:
    """Release the tensors that an error and its causes hold through the frames of their tracebacks.

    Called by whoever catches an error and goes on, or raises it again. The traceback still prints as before. Frames
    that are running stay in it, so each function that lets the error out calls this again.
    """
    running = _running_frames()
    seen: set[int] = set()
    errors = [error]
    while errors:
        current = errors.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        errors += [each for each in (current.__cause__, current.__context__) if each is not None]
        if isinstance(current, AttributeError):
            current.obj = None  # the object without the attribute, kept for hints at similar names
        current.__traceback__ = _emptied(current.__traceback__, running)


def _running_frames() -> set[int]:
    """Return the `id` of each frame of this thread. References to frames would make a cycle with this one."""
    frames = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.add(id(frame))
        frame = frame.f_back
    return frames


def _emptied(entry: TracebackType | None, running: set[int]) -> TracebackType | None:
    """Return the traceback from `entry` on, with empty frames in place of those that have ended.

    Clearing frames is not enough: functions in them hold their closures. One in torch closes over the arguments of a
    module that has hooks. Entries of running frames are changed in place, because `raise` goes by them before Python
    3.11.
    """
    entries = []
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    following = None
    while entries:
        entry = entries.pop()
        if id(entry.tb_frame) in running:
            entry.tb_next = following
            following = entry
        else:
            following = TracebackType(following, _empty_frame(entry.tb_frame), entry.tb_lasti, entry.tb_lineno)
            with suppress(RuntimeError):  # it is running in another thread
                entry.tb_frame.clear()
    return following


def _empty_frame(frame: FrameType) -> FrameType:
    """Return a frame that prints like `frame` and holds nothing: the frame of a generator that never starts."""
    code, known = frame.f_code, frame.f_globals
    # From Python 3.11 on the line table also tells the position in the line.
    shown = ["co_name", "co_filename", "co_firstlineno"]
    shown += ["co_qualname", "co_linetable"] if sys.version_info >= (3, 11) else []
    told: dict[str, Any] = {name: getattr(code, name) for name in shown}
    # The code must be as long as its line table says: when calls are traced, Python writes one entry for each
    # instruction to memory of the size of the code.
    told["co_code"] = _never_started.__code__.co_code.ljust(len(code.co_code), _NO_OPERATION)
    module = {name: known[name] for name in _OF_MODULE if name in known}
    return FunctionType(_never_started.__code__.replace(**told), module)().gi_frame


def _never_started() -> Iterator[None]:
    yield
