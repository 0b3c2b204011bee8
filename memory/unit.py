"""ManagedModel: one module whose weights move between the tiers disk, host and device.

The module object itself never goes away: on the disk tier its parameters are on `meta`, on the host tier they are the
CPU tensors that stay the truth, on the device tier they are (wholly or in part) copies of those.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from .placement import Placement

Role = Literal["text_encoder", "transformer", "vae", "other"]
Tier = Literal["disk", "host", "device"]
ROLES: tuple[Role, ...] = ("text_encoder", "transformer", "vae", "other")


# Building a module on `meta` patches torch for the whole process, in accelerate and in the libraries' own loaders.
_building = threading.RLock()


@dataclass
class Slot:
    """The place of one parameter or buffer: `holder[key]`, where holder is a module's `_parameters` or `_buffers`."""

    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor

    def set(self, tensor: torch.Tensor) -> None:
        if isinstance(self.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        self.holder[self.key] = tensor

    def restore(self) -> None:
        self.holder[self.key] = self.tensor


def slots(module: nn.Module) -> Iterator[Slot]:
    """Every parameter and buffer of a module, tied ones as often as they are held."""
    for owner in module.modules():
        yield from own_slots(owner)


def own_slots(module: nn.Module) -> Iterator[Slot]:
    """The parameters and buffers that a module holds itself, without those of its children."""
    for holder in (module._parameters, module._buffers):
        for key, tensor in holder.items():
            if tensor is not None:
                yield Slot(holder, key, tensor)


class ManagedModel:
    """A module, its role, where its weights are now, and how to read them again.

    `build` returns the module's structure with parameters on `meta`; `read` returns a module of the same structure
    with its weights on the CPU, and is None for a module that only exists in memory (it is then never dropped to
    disk). Both are called when first needed. `label` tells units of several pipelines apart.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        build: Callable[[], nn.Module],
        read: Callable[[], nn.Module] | None = None,
        label: str = "",
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r} of {name!r}. Roles are {', '.join(ROLES)}.")
        self.name = name
        self.role: Role = role
        self.label = label
        self.placement: Placement | None = None
        self.pinned = False
        self.leases = 0
        self.last_use = 0
        self.least_streamed_bytes: int | None = None  # asked for once, while the weights are not on the device
        self.work: Hashable = None  # what it is going to do: sizes differ in the memory they work in
        self._working: dict[Hashable, int] = {}
        self._build = build
        self._read = read
        self._module: nn.Module | None = None
        self._on_host = False

    @classmethod
    def from_module(cls, name: str, role: Role, module: nn.Module) -> ManagedModel:
        """A unit around a module that is already in memory, on the CPU."""
        unit = cls(name, role, build=lambda: module)
        unit.module.requires_grad_(False)
        unit._on_host = True
        return unit

    @property
    def module(self) -> nn.Module:
        """The one module object of this unit, whatever its tier."""
        with _building:
            if self._module is None:
                module = self._build().eval()
                module.__class__ = _located(type(module))  # type: ignore[arg-type]
                self._module = module
                self.runs_on(torch.device("cpu"))
        return self._module

    def runs_on(self, device: torch.device) -> None:
        """Say where the module runs. Callers ask `module.device` where its inputs belong, wherever its weights are."""
        vars(self.module)["_runs_on"] = device

    @property
    def tier(self) -> Tier:
        """Where the weights are now."""
        if self.placement is not None and self.placement.on_device:
            return "device"
        return "host" if self._on_host else "disk"

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights and buffers; tied ones count once."""
        return sum({id(slot.tensor): slot.tensor.nbytes for slot in self._host_slots()}.values())

    @property
    def leaf_bytes(self) -> int:
        """Bytes that the largest single module holds itself: the least that must be on the device at a time."""
        return max((sum(s.tensor.nbytes for s in own_slots(m)) for m in self.module.modules()), default=0)

    @property
    def working_bytes(self) -> int:
        """Bytes needed beside the weights for the present `work`, as measured before; 0 if it was never done."""
        return self._working.get(self.work, 0)

    def worked_in(self, measured_bytes: int) -> None:
        """Note what the present `work` has taken."""
        self._working[self.work] = max(self.working_bytes, measured_bytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on the device now."""
        return self.placement.resident_bytes if self.placement else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of weights in RAM now."""
        return self.size_bytes if self._on_host else 0

    @property
    def reloadable(self) -> bool:
        """Whether the host copy may be dropped."""
        return self._read is not None

    def load(self) -> int:
        """Bring the weights from disk to RAM if they are not there yet. Returns the bytes read."""
        if self._on_host or self._read is None:
            return 0
        with _building, torch.inference_mode():
            _adopt_tensors(self.module, self._read(), self.name)
        self._on_host = True
        return self.size_bytes

    def drop(self) -> int:
        """Give the host copy up; it is read again when next needed. Returns the bytes freed."""
        if not self._on_host or self._read is None:
            return 0
        if self.placement is not None:
            raise RuntimeError(f"{self.name} is in use and cannot be dropped to disk.")
        freed = self.size_bytes
        meta: dict[int, torch.Tensor] = {}
        for slot in slots(self.module):
            if isinstance(slot.tensor, nn.Parameter):
                slot.set(meta.setdefault(id(slot.tensor), torch.empty_like(slot.tensor, device="meta")))
        self._on_host = False
        return freed

    def _host_slots(self) -> Iterator[Slot]:
        return iter(self.placement.host_slots) if self.placement else slots(self.module)

    def __repr__(self) -> str:
        return f"<{self.role} {self.label + '/' if self.label else ''}{self.name}, {self.tier}>"


@functools.cache
def _located(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls` with a `device` that is the unit's word, not that of the first parameter, which may be on `meta`."""
    device = property(lambda module: vars(module)["_runs_on"])
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, "device": device})


def _adopt_tensors(module: nn.Module, source: nn.Module, name: str) -> None:
    """Make `module` hold the very tensors of `source`."""
    ours, theirs = dict(module.named_modules()), dict(source.named_modules())
    for path, owner in theirs.items():
        target = ours.get(path)
        if target is None or target._parameters.keys() != owner._parameters.keys():
            raise ValueError(f"the weights of {name} do not match its config at {path or 'the top'!r}.")
        target._parameters.update(owner._parameters)
        target._buffers.update(owner._buffers)
    module.requires_grad_(False)
