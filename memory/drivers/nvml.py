"""The device memory of a process as NVIDIA's driver counts it, from its library NVML."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_MOST = 256  # processes on one card that are read
_NOT_TOLD = 2**64 - 1  # `NVML_VALUE_NOT_AVAILABLE`, the answer under Windows


class _Process(ctypes.Structure):
    """`nvmlProcessInfo_t`."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def used_bytes(uuid: str, pid: int | None = None, library: str = _LIBRARY) -> int | None:
    """Return the bytes that a process has on the card `uuid`: tensors, context and libraries.

    `pid` is by default this process. Returns None if the figure is not available: without the library, under Windows,
    and in a container with its own process ids.
    """
    nvml = _opened(library)
    if nvml is None:
        return None
    try:
        card, count, found = ctypes.c_void_p(), ctypes.c_uint(_MOST), (_Process * _MOST)()
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        if nvml.nvmlDeviceGetHandleByUUID(name.encode("ascii"), ctypes.byref(card)) != 0:
            return None
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(card, ctypes.byref(count), found) != 0:
            return None
    except AttributeError:  # an old library without one of these functions
        return None
    mine = os.getpid() if pid is None else pid
    told = [each.used_bytes for each in found[: count.value] if each.pid == mine and each.used_bytes != _NOT_TOLD]
    return max(told, default=None)


@functools.cache
def _opened(library: str) -> ctypes.CDLL | None:
    """Return the library, begun once for the process: on a node of many cards that takes seconds. None if it fails."""
    try:
        nvml = ctypes.CDLL(library)
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
