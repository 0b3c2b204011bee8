"""A simulated accelerator: `enable()` makes the device `sim:0` real to torch in this process, run by the CPU.

Tensors on it hold their data in RAM but say that they are on `sim:0`. Its memory has a cap and is counted
byte by byte, copies are counted, and a virtual clock (see `card`) says how long work would take at
stated rates. What a test may rely on, and what not:

- Sizes are exact bytes of storages: no rounding. Workspaces, fragmentation and a driver's context count only as given
  to `enable` (see `CardOverhead`).
- Values are the CPU's. Kernels run at once, in the order of the calls, on whatever stream. So do copies, and only the
  clock and `Stats.hazards` know of streams; `enable(copies=...)` makes copies as late as a real card may (see `lazy`).
- To an eager card a non-blocking copy is asynchronous whether its RAM is pinned or not.
  `Tensor.pin_memory()` makes a plain copy that says it is pinned; `torch.empty(..., pin_memory=True)` is
  refused by torch.
- Random numbers come from the CPU's generators; `torch.Generator("sim")` does not exist. Nor do
  `torch.Stream`, `torch.compile` and `torch.accelerator` for it: use `torch.sim`.
- It is the process's one out-of-tree device, and torch then takes it for the accelerator even where there is
  a real card: keep the two in separate processes.

See `tensor` for what a tensor cannot do.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import backend_registration

from ..sizes import parse_bytes
from . import card as state
from . import clock as clock
from . import kernels as kernels
from . import lazy
from .attention import never
from .card import CardOverhead, Stats, Transfer
from .clock import Event, Stream

__all__ = [
    "DEVICE_TYPE", "Event", "CardOverhead", "Stats", "Stream", "Transfer", "enable", "fail_after", "is_enabled",
    "ram_taken", "reset_stats", "stats", "supported", "take_interval_peak", "watch",
]  # fmt: skip

DEVICE_TYPE = "sim"
_NAME = "Simulated accelerator"

_library: torch.library.Library | None = None
_reason: str | None = None  # why it does not work, once that is known
_enabled = False
_enabling = threading.Lock()


def supported() -> str | None:
    """Return None if this torch can run the simulated accelerator, else one line that says what does not work.

    It is tried once in a process (see `selfcheck`), which registers the device with torch for good. If that fails, the
    device has no kernels, and `enable` goes on refusing it.
    """
    global _reason
    with _enabling:
        if _library is None and _reason is None:
            _reason = _why_not_here() or _register()
        return _reason


def _why_not_here() -> str | None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return (
            f"torch {torch.__version__} cannot register a device in Python, which the simulated accelerator is. "
            "Use a newer one."
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone" or hasattr(torch, DEVICE_TYPE):
        return f"the simulated accelerator needs torch's one place for an out-of-tree device, which {taken!r} has taken"
    return None


def is_enabled() -> bool:
    """Return whether `enable` has been called in this process, with success."""
    return _enabled


def enable(
    total: int | str = "256MB",
    h2d_gbps: float = 25.0,
    d2h_gbps: float = 25.0,
    tflops: float | None = None,
    reserved: int | str = 0,
    disk_gbps: float | None = None,
    slot: int = 0,
    fused_attention: bool = True,
    pages_above: int | str | None = None,
    unified: bool = False,
    overhead: CardOverhead | None = None,
    copies: lazy.Mode = "eager",
    tells_free: bool = True,
    unknown_types: Iterable[torch.dtype] = (),
    attention_tflops: float | None = None,
) -> None:
    """Make the device `sim:0` real, or give the one there is another size, other rates and fresh counters.

    Tensors already on the device stay, and count. Raises RuntimeError if torch cannot do it (see `supported`), and
    ValueError for a size or a rate that makes no sense.

    Memory: `total` caps it, and `reserved` bytes of that are gone from the start (other programs). `overhead` adds the
    driver's context, libraries, workspaces and fragmentation. Beyond `pages_above` bytes allocations succeed, and
    kernels wait for bytes in system memory, as under Windows. `unified`: device memory is the system's RAM. Without
    `tells_free`, `mem_get_info` raises RuntimeError, as drivers of XPU do.

    Rates, None for no time: `h2d_gbps` and `d2h_gbps` are 1e9 bytes per second to and from the device, `disk_gbps`
    those of reading weights. `tflops` is 1e12 operations per second of products, convolutions and attention,
    `attention_tflops` of attention alone.

    Kernels: without `fused_attention` the card materializes the scores. `copies` are made at once ("eager"), or as late
    as CUDA or XPU may make them. Of `unknown_types` it has no kernels but views, as MPS of float8. A card in another
    `slot` is a different one of the same name.
    """
    global _enabled
    if copies not in lazy.MODES:
        raise ValueError(f"copies must be one of {', '.join(lazy.MODES)}, not {copies!r}")
    total_bytes, reserved_bytes = parse_bytes(total), parse_bytes(reserved)
    rates = {"h2d_gbps": h2d_gbps, "d2h_gbps": d2h_gbps, "disk_gbps": disk_gbps}
    for name, rate in {**rates, "tflops": tflops, "attention_tflops": attention_tflops}.items():
        if rate is not None and not rate > 0:
            raise ValueError(f"{name} must be above 0, not {rate}")
    if attention_tflops is not None and tflops is None:
        raise ValueError("attention_tflops needs tflops, those of all else")
    if reason := supported():
        raise RuntimeError(reason)
    flops, attention = (None if each is None else each * 1e12 for each in (tflops, attention_tflops))
    disk = None if disk_gbps is None else disk_gbps * 1e9
    to_device, from_device = h2d_gbps * 1e9, d2h_gbps * 1e9
    state.card.configure(
        total_bytes, reserved_bytes, to_device, from_device, flops, disk, slot, overhead, attention_flops=attention
    )
    state.card.fuses = None if fused_attention else never
    state.card.unified = unified
    lazy.copies.mode = copies
    state.card.tells_free, state.card.unknown_types = tells_free, frozenset(unknown_types)
    state.card.share = 1.0
    state.card.pages_above = None if pages_above is None else parse_bytes(pages_above)
    _enabled = True


def ram_taken() -> tuple[int, int]:
    """Return the RAM that the card's memory takes now, and the most that it may take; (0, 0) if not enabled."""
    if not _enabled:
        return 0, 0
    return state.card.allocated_bytes(), max(0, (state.card.total_bytes or 0) - state.card.reserved_bytes)


def stats() -> Stats:
    """Return the counters since the last `reset_stats` or `enable`."""
    return state.card.stats()


def reset_stats() -> None:
    """Set counters and clock to zero, and the peak to the bytes held now."""
    state.card.reset()


def take_interval_peak() -> int:
    """Return the highest allocated bytes since the last call of this. `stats().peak_bytes` is not changed."""
    return state.card.take_interval_peak()


@contextmanager
def watch(fn: Callable[[Transfer], None]) -> Iterator[None]:
    """Call `fn` on every copy to, from or within the device, in the thread that makes the copy."""
    watchers = state.card.watchers
    watchers.append(fn)
    try:
        yield
    finally:
        watchers.remove(fn)


@contextmanager
def fail_after(n_allocations: int) -> Iterator[None]:
    """Make the n-th allocation from now (1 is the next), and only it, raise torch.OutOfMemoryError."""
    if n_allocations < 1:
        raise ValueError(f"allocations are counted from 1, not from {n_allocations}")
    card = state.card
    card.fail_in = n_allocations
    try:
        yield
    finally:
        card.fail_in = 0


@dataclass(frozen=True)
class DeviceProperties:
    """The properties that `torch.sim.get_device_properties()` returns."""

    name: str
    total_memory: int
    uuid: str
    pci_bus_id: int
    pci_device_id: int = 0
    pci_domain_id: int = 0xFFFF  # where no system has one
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


def _total_bytes() -> int:
    card = state.card
    return card.allocated_bytes() if card.total_bytes is None else card.total_bytes


def _properties() -> DeviceProperties:
    slot = state.card.slot
    return DeviceProperties(_NAME, _total_bytes(), f"simulated-{slot}", slot)


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    total = _total_bytes()
    card = state.card
    if not card.tells_free:
        raise RuntimeError(f"the device {_NAME} doesn't support querying the available free memory")
    return max(0, total - card.reserved_bytes - card.outside_bytes() - card.pool_bytes()), total


def _set_share(fraction: float, device: Any = None) -> None:
    state.card.share = fraction


def _set_device(device: Any) -> None:
    if _index(device):
        raise RuntimeError(f"invalid device ordinal {device}: there is only {DEVICE_TYPE}:0")


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device or DEVICE_TYPE).index or 0


@contextmanager
def _device(device: Any) -> Iterator[None]:
    _set_device(device)
    yield


def _synchronize() -> None:
    state.card.wait_until(state.card.latest)
    lazy.copies.force_all()


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _stream(stream: Stream | None) -> AbstractContextManager[Any]:
    return stream or nullcontext()


def _backend() -> types.ModuleType:
    """Return the module `torch.sim`, with the functions that torch, accelerate and diffusers look for."""
    module = types.ModuleType("torch.sim", __doc__)
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _set_device,
        "device": _device,
        "get_device_name": lambda device=None: _NAME,
        "get_device_properties": lambda device=None: _properties(),
        "get_device_capability": lambda device=None: (0, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "synchronize": lambda device=None: _synchronize(),
        "empty_cache": lambda: state.card.empty_pool(),
        "ipc_collect": lambda: None,
        "memory_allocated": lambda device=None: state.card.allocated_bytes(),
        "max_memory_allocated": lambda device=None: state.card.peak_bytes(),
        "memory_reserved": lambda device=None: state.card.pool_bytes(),
        "max_memory_reserved": lambda device=None: state.card.pool_peak_bytes(),
        "reset_peak_memory_stats": lambda device=None: state.card.reset_peak(),
        "mem_get_info": _mem_get_info,
        "set_per_process_memory_fraction": _set_share,
        "get_per_process_memory_fraction": lambda device=None: state.card.share,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda new_state, device=None: torch.default_generator.set_state(new_state.cpu()),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: clock.current_stream(),
        "default_stream": lambda device=None: clock.default_stream,
        "stream": _stream,
        "set_stream": clock.set_stream,
        "read_from_disk": clock.read_from_disk,
        "cudart": lambda: lazy.Cudart,
    }
    vars(module).update(functions)
    return module


def _register() -> str | None:
    """Register the device and its kernels below `__torch_dispatch__` with torch. Return one line if that fails."""
    global _library
    from .selfcheck import first_failure  # needed once, if ever

    device, library = None, torch.library.Library("aten", "IMPL")
    try:
        backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_backend())
        device = torch.device(DEVICE_TYPE, 0)
        kernels.register(library)
        failure = first_failure(device)
    except Exception as error:
        failure = f"registering: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if failure:  # the library ends here, and the kernels with it
        return f"the simulated accelerator does not work on torch {torch.__version__} ({failure})"
    state.card.device, _library = device, library
    return None
