"""The memory that NVIDIA's driver counts for this process on a card, by its library (NVML)."""

from __future__ import annotations

import ctypes
import os
import sys

_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_MOST = 256  # processes on a card
_NOT_TOLD = 2**64 - 1  # as under Windows


class _Process(ctypes.Structure):
    """`nvmlProcessInfo_t`."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def used_bytes(uuid: str, pid: int | None = None, library: str = _LIBRARY) -> int | None:
    """Bytes of the card of a UUID that a process has, by default this one: tensors, context, libraries.

    None where that is not told: without the library, under Windows, and in a container that has numbers of its own
    for processes.
    """
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        card, count, found = ctypes.c_void_p(), ctypes.c_uint(_MOST), (_Process * _MOST)()
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        if nvml.nvmlDeviceGetHandleByUUID(name.encode("ascii"), ctypes.byref(card)) != 0:
            return None
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(card, ctypes.byref(count), found) != 0:
            return None
    except AttributeError:  # a library without one of these
        return None
    finally:
        nvml.nvmlShutdown()
    mine = os.getpid() if pid is None else pid
    told = [each.used_bytes for each in found[: count.value] if each.pid == mine and each.used_bytes != _NOT_TOLD]
    return max(told, default=None)
