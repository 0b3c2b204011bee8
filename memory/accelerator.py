"""One device behind the same interface on CUDA, ROCm, XPU, MPS, the CPU and the simulated accelerator."""

from __future__ import annotations

import functools
import platform
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch

from . import ram, simulated
from .drivers import nvml
from .host.flags import host_flags
from .simulated import card as simulated_card
from .simulated.attention import Fuses, never
from .sizes import format_bytes

MB = 2**20
_BUS = Path("/sys/bus/pci/devices")


def is_wddm(kind: str, system: str = sys.platform, release: str = platform.release()) -> bool:
    """Return whether Windows manages a kind of device (WDDM), as it does for Linux inside of Windows (WSL).

    Its driver queues commands in batches, and pages silently.
    """
    return kind == "cuda" and (system == "win32" or (system == "linux" and "microsoft" in release.lower()))


class Peaks(NamedTuple):
    """Peak bytes in tensors, and peak bytes that the allocator had reserved from the driver for them."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def over(self, other: Peaks) -> Peaks:
        """Return the higher figure of each kind."""
        return Peaks(*map(max, self, other))


class Accelerator:
    """Memory counters of one torch device, in bytes.

    On the CPU there is nothing to manage: `is_cpu` is true, sizes are those of RAM, and the counters read 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cpu = device.type == "cpu"
        self._outside: int | None = None
        self._told: tuple[int, int] | None = None  # bytes free, and reserved by this process, when first asked
        self._module: ModuleType | None = None if self.is_cpu else torch.get_device_module(device)

    @property
    def name(self) -> str:
        """The maker's name of the device, such as "NVIDIA GeForce RTX 4070"."""
        describe = getattr(self._module, "get_device_name", None)
        return describe(self.device) if describe else self.device.type.upper()

    @property
    def identity(self) -> str:
        """A text that tells the device from others of its name: UUID, slot on the bus and link width, where known."""
        describe = getattr(self._module, "get_device_properties", None)
        found = describe(self.device) if describe else None
        place = [getattr(found, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        slot = "" if -1 in place else "{:04x}:{:02x}:{:02x}.0".format(*place)
        told = (self.name, str(getattr(found, "uuid", "")), slot, _link_width(slot) if slot else "")
        return ", ".join(filter(None, told))

    def total_bytes(self) -> int:
        """Return the memory of the device in bytes."""
        if self.is_cpu:
            return ram.total_bytes()
        if self.device.type == "mps":
            return torch.mps.recommended_max_memory()
        return self._mem_get_info()[1]

    def free_bytes(self) -> int:
        """Return the bytes that an allocation could get now, including this process's own cached blocks.

        A limit by `torch.cuda.set_per_process_memory_fraction` counts.
        """
        if self.is_cpu:
            return ram.available_bytes()
        if self.device.type == "mps":
            return max(0, torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
        reserved = self._count("memory_reserved")
        free, total = self._mem_get_info()
        share = getattr(self._module, "get_per_process_memory_fraction", lambda device: 1.0)(self.device)
        return min(free, max(0, int(share * total) - reserved)) + max(0, reserved - self._count("memory_allocated"))

    def allocated_bytes(self) -> int:
        """Return the bytes in live tensors of this process."""
        if self.device.type == "mps":
            return torch.mps.current_allocated_memory()
        return self._count("memory_allocated")

    def outside_bytes(self) -> int:
        """Return the bytes that the driver counts for this process beside the allocator: a context, libraries.

        0 if the driver does not tell. A real driver is asked once; `ask_driver` asks again.
        """
        if self.device.type == simulated.DEVICE_TYPE:
            return simulated_card.card.outside_bytes()
        if self._outside is None:
            self.ask_driver()
        return self._outside or 0

    def workspace_bytes(self) -> int:
        """Return the bytes that cuBLAS takes from the allocator at its first product, and keeps: torch's default.

        0 on other devices, where it is not known before a run.
        """
        if self.device.type != "cuda" or torch.version.hip:
            return 0
        return 32 * 2**20 if torch.cuda.get_device_capability(self.device)[0] >= 9 else 8320 * 2**10

    def driver_bytes(self) -> int:
        """Return the bytes that the driver counts for this process, as far as it tells.

        That is the allocator's memory plus `outside_bytes`.
        """
        return max(self._count("memory_reserved"), self.allocated_bytes()) + self.outside_bytes()

    def ask_driver(self) -> None:
        """Ask the driver what it counts for this process. Does nothing unless CUDA is initialized."""
        if self.device.type != "cuda" or not torch.cuda.is_initialized():  # no context: the driver counts nothing yet
            return
        used = nvml.used_bytes(str(getattr(torch.cuda.get_device_properties(self.device), "uuid", "")))
        free, total = self._mem_get_info()
        self._outside = _outside(used, self._count("memory_reserved"), total - free)

    def take_peak_bytes(self) -> int:
        """Return the peak of `allocated_bytes` since the last call. See `take_peaks`."""
        return self.take_peaks().allocated_bytes

    def take_peaks(self) -> Peaks:
        """Return the peaks since the last call, and start anew. A backend without peaks gives the present figures.

        On the simulated device `torch.sim.max_memory_allocated()` stays as it is. Elsewhere the backend has only one
        peak, which is reset: use `PeakMeter` where several readers need it.
        """
        if self.device.type == simulated.DEVICE_TYPE:
            return Peaks(simulated.take_interval_peak(), simulated_card.card.take_interval_pool())
        peak = max(self._count("max_memory_allocated"), self.allocated_bytes())
        reserved = max(self._count("max_memory_reserved"), self._count("memory_reserved"), peak)
        reset = getattr(self._module, "reset_peak_memory_stats", None)
        if reset and getattr(self._module, "is_initialized", lambda: True)():
            reset(self.device)
        return Peaks(peak, reserved)

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""
        if self._module is None:
            return
        if self.device.type == "cuda" and torch.cuda.is_initialized() and not host_flags().graphs:
            # Workspaces of cuBLAS count as live tensors. They are made again when needed, but a captured graph keeps
            # their addresses.
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        self._module.empty_cache()

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        if self.device.type == "mps":
            torch.mps.synchronize()
        elif self._module is not None:
            self._module.synchronize(self.device)

    @property
    def fuses(self) -> Fuses | None:
        """A function that tells which attention is one kernel here, without a matrix of scores.

        None means all attention. It is None on the CPU too: plans made there are for a card elsewhere.
        """
        if self.device.type == simulated.DEVICE_TYPE:
            return simulated_card.card.fuses
        if self.is_cpu:  # plans made on the CPU are for a card elsewhere
            return None
        return never if self.device.type == "mps" else functools.partial(_has_kernel, self.device)

    @property
    def is_unified(self) -> bool:
        """Return whether the device's memory is the system's. A copy in RAM is then of no use, and takes room."""
        if self.device.type == simulated.DEVICE_TYPE:
            return simulated_card.card.unified
        describe = getattr(self._module, "get_device_properties", None)
        return self.device.type == "mps" or bool(describe and getattr(describe(self.device), "is_integrated", False))

    @property
    def pages_silently(self) -> bool:
        """Return whether allocations beyond the device's memory go to the system's.

        That is no error, but many times slower.
        """
        if self.device.type == simulated.DEVICE_TYPE:
            return simulated_card.card.pages_above is not None
        return is_wddm(self.device.type)

    @property
    def simulated_disk(self) -> Callable[[int], Any] | None:
        """A function that makes a simulated disk read bytes, and returns the event of their arrival.

        None for real disks. The event is None if the simulated disk takes no time.
        """
        return getattr(self._module, "read_from_disk", None)

    @property
    def attention(self) -> str:
        """A text that tells the device from others with other attention kernels. Empty if `fuses` is None."""
        return f"{self.name}, torch {torch.__version__}" if self.fuses else ""

    def default_reserve_bytes(self) -> int:
        """Return the bytes left to the desktop and other programs when the user names no budget.

        For example 400 MB on Linux and 600 MB under Windows.
        """
        if self.device.type in ("cpu", simulated.DEVICE_TYPE):
            return 0
        if self.device.type == "mps":
            return 1024 * MB
        return (600 if sys.platform == "win32" or is_wddm(self.device.type) else 400) * MB

    def _count(self, counter: str) -> int:
        read = getattr(self._module, counter, None)
        return int(read(self.device)) if read else 0

    def _mem_get_info(self) -> tuple[int, int]:
        """Return free bytes and all bytes, as the driver tells.

        Some drivers of XPU refuse to tell the free bytes, or tell the same number whatever is taken. Then the result is
        what this process has not reserved.
        """
        assert self._module is not None
        taken = self._count("memory_reserved")
        try:
            free, total = self._module.mem_get_info(self.device)
        except RuntimeError:
            if self.device.type == "cuda":
                raise
            total = self._module.get_device_properties(self.device).total_memory
            return max(0, total - taken), total
        if self._told is None:
            self._told = free, taken
        if free == self._told[0] and taken > self._told[1]:
            free -= taken - self._told[1]
        return max(0, min(free, total - taken)), total

    def __repr__(self) -> str:
        return f"Accelerator({self.device}, {self.name}, {format_bytes(self.total_bytes())})"


def _outside(used: int | None, reserved: int, taken: int) -> int:
    """Return the bytes beside the `reserved` ones of the allocator, where the driver counts `used` for this process.

    0 if it does not tell, or tells more than is `taken` on the card: in a container another process may have our
    number.
    """
    return 0 if used is None or used > taken else max(0, used - reserved)


def _link_width(slot: str) -> str:
    """Return the number of PCI lanes of a slot, as Linux tells it, such as "x8"; "" if it does not.

    The same card copies more slowly in a narrower slot.
    """
    try:
        return f"x{(_BUS / slot / 'current_link_width').read_text('ascii').strip()}"
    except (OSError, ValueError):
        return ""


def _has_kernel(
    device: torch.device,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Return whether torch has a fused kernel for attention of these shapes on a device, with its present settings.

    Torch looks at shapes, types and the device only. So it is asked about stand-ins that hold one row each.
    """
    q, k, v = (_stand_in(each, device) for each in (query, key, value))
    mask = None if attn_mask is None else _stand_in(attn_mask, device)
    if device.type != "cuda":
        try:
            chosen = torch._fused_sdp_choice(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return chosen > 0  # 0 is the way with a matrix of scores, -1 an error
        except NotImplementedError:  # torch chooses no kernel for this device
            return False
    backends = torch.backends.cuda
    asked = backends.SDPAParams(q, k, v, mask, dropout_p, is_causal, enable_gqa)
    return (
        backends.can_use_flash_attention(asked)
        or backends.can_use_efficient_attention(asked)
        or backends.can_use_cudnn_attention(asked)
    )


def _stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same shape and type on the device, whose memory is that of one row."""
    return torch.empty(tensor.shape[-1:], dtype=tensor.dtype, device=device).expand(tensor.shape)


class PeakMeter:
    """Reads the peaks of a device since this meter was last read.

    The backend has only one peak, which any reader resets. So each reading is passed on to all meters of the device.
    """

    _all: ClassVar[weakref.WeakSet[PeakMeter]] = weakref.WeakSet()

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seen = Peaks()
        self._all.add(self)

    def take(self) -> Peaks:
        """Return the peaks since the last call, and start anew."""
        peaks = self._accelerator.take_peaks()
        for meter in list(self._all):
            if meter._accelerator.device == self._accelerator.device:
                meter._seen = meter._seen.over(peaks)
        seen, self._seen = self._seen, Peaks()
        return seen


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the torch device that the user's word means, with its index.

    "auto" is the first GPU that torch sees, else the CPU. "sim" switches the simulated accelerator on if need be.
    Raises ValueError for a device that is not there.
    """
    if str(device) == "auto":
        for kind in ("cuda", "xpu", "mps"):
            if getattr(torch, kind).is_available():
                return resolve_device(kind)
        return torch.device("cpu")
    if str(device).split(":")[0] == simulated.DEVICE_TYPE and not simulated.is_enabled():
        simulated.enable()
    try:
        found = torch.device(device)
        if found.type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(found)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {str(device)!r}. Use auto, cpu, cuda, xpu, mps or sim.") from error
    if not module.is_available():
        raise ValueError(f"device {str(device)!r} is not available here. Run `ballast doctor` to see what is.")
    if found.index is None:
        found = torch.device(found.type, 0 if found.type == "mps" else module.current_device())
    if found.index >= module.device_count():
        raise ValueError(f"device {str(device)!r} does not exist: there are {module.device_count()} of its kind.")
    return found
