"""A unit as the host's memory manager sees it: by the members that it asks its own model patchers for.

No class of the host is inherited: its some hundred members work on weights that this object does not hold, and would
fail without a word. The host calls in from any thread, between any two layers, in the middle of an error, and an error
of ours would spoil its list; so nothing here raises, and what cannot be done now is reported as not done.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

# [Note: Host shrink during a call]
# The host frees memory by calling `partially_unload` on the models in its list, from any thread, also while a unit of
# ours computes and while another allocation is failing. It holds its own lock, and expects an answer at once.
# - The answer is the bytes that are free when the method returns. A group that runs is freed when its call ends, and
#   is not counted, so that the host goes on to other models for the rest.
# - Freeing means dropping references to device memory: weights have their truth in RAM or in files, and nothing is
#   copied back.
# - The engine takes its lock only to change its lists. It does not hold it while it waits for reads or copies, so the
#   host is never kept waiting for the disk.
# - Nothing raises. An exception here would leave the host's list half changed: `_never_raises` logs it, and the host
#   hears that nothing was freed.

log = logging.getLogger("ballast")

Method = TypeVar("Method", bound=Callable[..., Any])


def _never_raises(default: Any) -> Callable[[Method], Method]:
    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def safe(self: HostPatcher, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                log.exception("Ballast: ComfyUI asked %r for %s, which failed", self, method.__name__)
                return default

        return safe  # type: ignore[return-value]

    return wrap


class Listed(Protocol):
    """A unit that the host is told of."""

    name: str
    label: str

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on the device now."""

    @property
    def host_bytes(self) -> int:
        """RAM taken by weights now."""


Unit = TypeVar("Unit", bound=Listed)
AnyUnit = TypeVar("AnyUnit", bound=Listed, contravariant=True)


class Counter(Protocol):
    """A counter of a device's memory."""

    def free_bytes(self) -> int:
        """Memory that an allocation could get now."""


class Mover(Protocol[AnyUnit]):
    """Who moves units for the host: the manager of their device."""

    @property
    def accelerator(self) -> Counter:
        """That device."""

    def shrink(self, unit: AnyUnit, bytes: int) -> int:
        """Free so many bytes of a unit, or as many as can be. Returns those freed."""

    def grow(self, unit: AnyUnit, bytes: int) -> int:
        """Keep up to `bytes` more of a unit. Return the bytes taken."""

    def let_go(self, unit: AnyUnit) -> None:
        """Take a unit off the device, as soon as it does not run."""


class HostPatcher(Generic[Unit]):
    """One unit in the host's list of loaded models. Sizes are bytes on the device.

    Its declared size is what the unit shall hold there (`target_bytes`), not its file: the host would move everybody
    out for weights that are going to be streamed. The manager keeps it alive; the host refers to it weakly.
    """

    parent = None

    def __init__(self, manager: Mover[Unit], unit: Unit, load_device: torch.device) -> None:
        self._manager = weakref.ref(manager)
        self._unit = weakref.ref(unit)
        self._name = f"{unit.label} {unit.name}".strip()
        self.model = type(self._name, (), {})()  # whose class names the model in the host's log
        self.load_device = load_device
        self.offload_device = torch.device("cpu")
        self.clone_base_uuid = object()  # like that of no other
        self.target_bytes = 0
        self.is_being_listed = False  # by the manager, which has just decided what stays

    @property
    def unit(self) -> Unit | None:
        """The unit, as long as its pipeline lives."""
        return self._unit()

    # Sizes

    def model_size(self) -> int:
        """Return what the unit shall hold; nothing once it has left, or as long as the host would make room for it."""
        return max(self.target_bytes, self.loaded_size()) if self.loaded_size() else 0

    @_never_raises(0)
    def loaded_size(self) -> int:
        """Return what it holds."""
        unit = self.unit
        return unit.resident_bytes if unit and not self.is_being_listed else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.loaded_size() else self.offload_device

    @_never_raises(0)
    def get_free_memory(self, device: torch.device) -> int:
        manager = self._manager()
        return manager.accelerator.free_bytes() if manager else 0

    @_never_raises(0)
    def get_ram_usage(self) -> int:
        return unit.host_bytes if (unit := self.unit) else 0

    # Moving

    @_never_raises(0)
    def partially_load(self, device: torch.device, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        """Keep up to `extra_memory` bytes more, or fewer if negative. Return the bytes added."""
        manager, unit = self._manager(), self.unit
        if manager is None or unit is None or self.is_being_listed:
            return 0
        if extra_memory < 0:
            return -manager.shrink(unit, int(-extra_memory))
        return manager.grow(unit, int(min(extra_memory, self.target_bytes - unit.resident_bytes)))

    @_never_raises(0)
    def partially_unload(self, device: torch.device | None, memory_to_free: float = 0, *_: Any, **__: Any) -> int:
        """Free whole groups that do not run. Return the bytes freed. See [Note: Host shrink during a call]."""
        manager, unit = self._manager(), self.unit
        if manager is None or unit is None:
            return 0
        return manager.shrink(unit, int(min(memory_to_free, unit.resident_bytes)))

    @_never_raises(None)
    def _leave(self) -> None:
        manager, unit = self._manager(), self.unit
        if manager is not None and unit is not None:
            manager.let_go(unit)

    def detach(self, unpatch_all: bool = True) -> Any:
        """Leave the device, or as much of it as is not running. Without `unpatch_all` the host only sorts its list."""
        if unpatch_all:
            self._leave()
        return self.model

    # What a unit has nothing of: patches, clones, memory-mapped weights, pins that the host may take

    def model_dtype(self) -> torch.dtype | None:
        return None

    def model_patches_to(self, *_: Any) -> None:
        return None

    def model_patches_models(self) -> list[Any]:
        return []

    def get_nested_additional_models(self) -> list[Any]:
        return []

    def lowvram_patch_counter(self) -> int:
        return 0

    def is_dynamic(self) -> bool:
        return False

    def is_clone(self, other: Any) -> bool:
        return other is self

    def clone(self) -> HostPatcher:
        return self

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        return 0, 0

    def pinned_memory_size(self) -> int:
        return 0

    def partially_unload_ram(self, *_: Any, **__: Any) -> int:
        return 0

    def __repr__(self) -> str:
        return f"<{self._name} of Ballast>"
