"""A unit as the host's memory manager sees it: an object with the members that it asks its own model patchers for.

It inherits from no class of the host: those have some hundred members that work on weights which this object does not
hold, and would fail silently. The host calls in from any thread, between any two layers, or in the middle of an error.
An error of ours would spoil its list. So nothing here raises: a request that cannot be met now is reported as not met.
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
    """Return a decorator that logs any exception of a method and returns `default` instead."""

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
    """A unit in the host's list."""

    name: str
    label: str

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on the device now."""

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM taken by weights now."""


Unit = TypeVar("Unit", bound=Listed)
AnyUnit = TypeVar("AnyUnit", bound=Listed, contravariant=True)


class Counter(Protocol):
    """A counter of a device's memory."""

    def free_bytes(self) -> int:
        """Return the bytes that an allocation could get now."""


class Mover(Protocol[AnyUnit]):
    """The manager of a device, which moves units for the host."""

    @property
    def accelerator(self) -> Counter:
        """The device's counter."""

    def shrink(self, unit: AnyUnit, bytes: int) -> int:
        """Free up to `bytes` of a unit. Return the bytes freed."""

    def grow(self, unit: AnyUnit, bytes: int) -> int:
        """Keep up to `bytes` more of a unit on the device. Return the bytes taken."""

    def evict_when_idle(self, unit: AnyUnit) -> None:
        """Evict a unit, at once or when its last lease ends."""


class HostPatcher(Generic[Unit]):
    """One unit in the host's list of loaded models. Sizes are bytes on the device.

    Its declared size is `target_bytes`, the bytes that the unit shall hold on the device, not the size of its file.
    Otherwise the host would evict everybody for weights that only stream through. The manager owns this object; the
    host refers to it weakly.
    """

    parent = None

    def __init__(self, manager: Mover[Unit], unit: Unit, load_device: torch.device) -> None:
        self._manager = weakref.ref(manager)
        self._unit = weakref.ref(unit)
        self._name = f"{unit.label} {unit.name}".strip()
        self.model = type(self._name, (), {})()  # the host logs the name of this class
        self.load_device = load_device
        self.offload_device = torch.device("cpu")
        self.clone_base_uuid = object()  # unique: no unit is a clone of another
        self.target_bytes = 0
        self.is_being_listed = False  # while `list_unit` runs: the manager has just decided what stays

    @property
    def unit(self) -> Unit | None:
        """The unit, or None once its pipeline is gone."""
        return self._unit()

    # Sizes

    def model_size(self) -> int:
        """Return the bytes that the unit shall hold on the device.

        0 if it holds none, and while it is being listed: the host would make room for its weights once more.
        """
        return max(self.target_bytes, self.loaded_size()) if self.loaded_size() else 0

    @_never_raises(0)
    def loaded_size(self) -> int:
        """Return the bytes that the unit holds on the device; 0 while it is being listed."""
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
        """Keep up to `extra_memory` bytes more on the device, or fewer if negative. Return the bytes added."""
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
    def _evict(self) -> None:
        manager, unit = self._manager(), self.unit
        if manager is not None and unit is not None:
            manager.evict_when_idle(unit)

    def detach(self, unpatch_all: bool = True) -> Any:
        """Evict the unit, as far as it is not running.

        Without `unpatch_all` the host only sorts its list: nothing moves.
        """
        if unpatch_all:
            self._evict()
        return self.model

    # Members for patches, clones, memory-mapped weights and pins, none of which a unit has

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
