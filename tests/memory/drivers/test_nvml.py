"""What NVIDIA's driver counts for a process, asked of a library that answers as NVML does by its header."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from ballast.memory.drivers import nvml

_SOURCE = """
#include <string.h>
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } info;
static int card;
int begun;
int nvmlInit_v2(void) { begun++; return INIT; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) {
  *found = &card;
  return strcmp(uuid, "GPU-1234") ? 6 : 0;
}
#ifdef PROCESSES
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, info *found) {
  if (device != &card || *count < 3) return 2;
  *count = 3;
  found[0] = (info){7, 111, ~0u, ~0u};
  found[1] = (info){41, 5000000000ull, ~0u, ~0u};
  found[2] = (info){42, ~0ull, ~0u, ~0u};
  return 0;
}
#endif
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Libraries: one that answers, one that does not begin, and an old one."""
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    folder, found = tmp_path_factory.mktemp("nvml"), {}
    (folder / "nvml.c").write_text(_SOURCE)
    for name, flags in {"sound": ["-DINIT=0", "-DPROCESSES"], "broken": ["-DINIT=9"], "old": ["-DINIT=0"]}.items():
        library = folder / f"{name}.so"
        subprocess.run([compiler, "-shared", "-fPIC", *flags, "nvml.c", "-o", str(library)], cwd=folder, check=True)
        found[name] = str(library)
    return found


@pytest.mark.skipif(os.name == "nt", reason="builds a shared object")
def test_driver_tells_of_one_process(built: dict[str, str], tmp_path: Path) -> None:
    sound = built["sound"]
    assert nvml.used_bytes("1234", 41, sound) == nvml.used_bytes("GPU-1234", 41, sound) == 5 * 10**9
    assert nvml.used_bytes("1234", 7, sound) == 111
    assert nvml.used_bytes("1234", 42, sound) is None, "not told, as under Windows"
    assert nvml.used_bytes("1234", 8, sound) is None, "not there, as in a container"
    assert nvml.used_bytes("1234", None, sound) is None
    assert nvml.used_bytes("9", 41, sound) is None, "another card"
    assert ctypes.c_int.in_dll(ctypes.CDLL(sound), "begun").value == 1, "it takes seconds where there are many cards"
    for name in (built["broken"], built["old"], str(tmp_path / "none.so")):
        assert nvml.used_bytes("1234", 41, name) is None
