"""What a module is made of: the places of its weights, its blocks, and which weights belong to which module's call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .hostbuffer import can_pack, layout

# Modules that read their children's weights themselves, so that these must come along with them.
WHOLE_MODULES = ["MultiheadAttention", "VectorQuantizer"]

_SMALL_SHARE = 0.01  # lists below this part of a module's weights are not worth a gate at every call


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


@dataclass(eq=False)
class BlockWeights:
    """A member of a block list, and the weights that are its own."""

    module: nn.Module
    slots: list[Slot]
    packed_bytes: int  # of the flat buffer, with its gaps
    held_bytes: int  # without them

    def tensors(self) -> list[torch.Tensor]:
        """The host's weights and buffers, each once."""
        return list({id(slot.tensor): slot.tensor for slot in self.slots}.values())

    def restore(self) -> None:
        """Let the module hold the host's tensors."""
        for slot in self.slots:
            slot.restore()


def split_blocks(module: nn.Module, host_slots: list[Slot]) -> tuple[list[BlockWeights], list[Slot]]:
    """The blocks with the weights that are theirs alone, and all other weights."""
    members = list(dict.fromkeys(member for _, blocks in block_lists(module) for member in blocks))
    holder_of: dict[int, int] = {}
    for index, member in enumerate(members):
        for slot in slots(member):
            # A submodule of two members belongs to neither.
            holder_of[id(slot.holder)] = index if holder_of.get(id(slot.holder), index) == index else -1
    owner_of: dict[int, int] = {}
    for slot in host_slots:
        index = holder_of.get(id(slot.holder), -1)
        owner_of[id(slot.tensor)] = index if owner_of.get(id(slot.tensor), index) == index else -1
    own: list[list[Slot]] = [[] for _ in members]
    for slot in host_slots:
        if (index := owner_of[id(slot.tensor)]) >= 0:
            own[index].append(slot)
    blocks: list[BlockWeights] = []
    for member, theirs in zip(members, own, strict=True):
        tensors = list({id(slot.tensor): slot.tensor for slot in theirs}.values())
        packed_bytes = layout(tensors)[1]
        if packed_bytes and all(map(can_pack, tensors)):
            held_bytes = sum(tensor.nbytes for tensor in tensors)
            blocks.append(BlockWeights(member, theirs, packed_bytes, held_bytes))
    streamable = {id(slot) for block in blocks for slot in block.slots}
    return blocks, [slot for slot in host_slots if id(slot) not in streamable]


def block_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The lists of blocks of a module, at whatever depth, none inside another, in the order of the module.

    A list counts if its members are called (so not lists of lists) and hold a part of the weights worth streaming.
    """
    total = sum(p.nbytes for p in module.parameters())
    found: list[tuple[str, nn.ModuleList]] = []
    for path, owner in module.named_modules():
        inside = any(path.startswith(f"{name}.") for name, _ in found)
        if isinstance(owner, nn.ModuleList) and path and not inside and all(_is_called(member) for member in owner):
            size = sum(p.nbytes for p in owner.parameters())
            if size and size >= _SMALL_SHARE * total:
                found.append((path, owner))
    return found


def _is_called(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward


def leafwise_slots(module: nn.Module) -> tuple[list[Slot], list[tuple[nn.Module, list[Slot]]]]:
    """What stays on the device under `Leafwise`, and what comes for the calls of which module.

    The top module's own few tensors stay, since its `forward` is already running when a unit is placed on demand, and
    so do buffers that are in no file: small tables, which models read from elsewhere too.
    """
    stays: list[Slot] = list(own_slots(module))
    comes: list[tuple[nn.Module, list[Slot]]] = []
    inside: set[nn.Module] = set()
    for child in module.children():
        for owner in child.modules():
            if owner in inside:
                continue
            whole = type(owner).__name__ in WHOLE_MODULES
            holders = list(owner.modules()) if whole else [owner]
            inside.update(holders)
            own: list[Slot] = []
            for holder in holders:
                unsaved = holder._non_persistent_buffers_set
                for slot in own_slots(holder):
                    (stays if slot.key in unsaved else own).append(slot)
            if own:
                comes.append((owner, own))
    return stays, comes
