"""Groups: runs of modules in the order of their calls, which stream, or stay on the device, as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..codecs.codec import Codec
from .hostbuffer import ALIGNMENT_BYTES, can_pack, layout
from .structure import ParameterRef, block_lists, is_called, own_refs, parameter_refs

# Modules that read their children's weights themselves, so that these must come along with them.
WHOLE_MODULES = ["MultiheadAttention", "VectorQuantizer"]

LARGE_BYTES = 16 * 2**20  # of a group: a copy of so much is as fast as any
_MOST_PIECES = 512  # of a large model, about: each costs the host some microseconds
_TOO_MANY = 560
_LEAST_PIECES = 32  # of a small one
_OWN_SHARE = 0.05  # of its weights: what a module with others inside may have for itself, and still come in parts


@dataclass(frozen=True)
class CallOrder:
    """The order of a module's calls, as it was seen.

    `order` are the paths of its modules with weights of their own, in the order of their first calls; empty if it is
    not known. `whole` are modules that read the weights of others inside them, `outside` those whose weights are read
    elsewhere. With `blocks` each member of a block list is whole, as compiled ones must be.
    """

    order: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    blocks: bool = False


@dataclass(eq=False)
class Owner:
    """A module whose weights must be there while it is called, and only then."""

    path: str
    module: nn.Module
    refs: list[ParameterRef]


@dataclass(eq=False)
class GroupWeights:
    """Modules that follow each other, and the weights that are theirs alone; `called` as far as is known.

    The tensors of LoRAs beside them come along: they follow the weights, from `stored_bytes` on, and are in no file.
    """

    owners: list[Owner]
    refs: list[ParameterRef]
    packed_bytes: int  # of all in a row, with the gaps
    stored_bytes: int  # of the weights, with theirs
    held_bytes: int  # of all without gaps
    called: bool = True

    def tensors(self) -> list[torch.Tensor]:
        """Return the host's weights, buffers and branches, each once."""
        return unique(self.refs)

    def stored(self) -> list[torch.Tensor]:
        """Return the tensors that are not of branches, each once."""
        return unique([ref for ref in self.refs if not ref.is_branch])

    def branches(self) -> list[torch.Tensor]:
        """Return the tensors of branches, each once."""
        return unique([ref for ref in self.refs if ref.is_branch])

    @property
    def plain_bytes(self) -> int:
        """Bytes of the tensors when all are decoded."""
        return plain_bytes_of(self.refs)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """How those are stored that are not plain, each once."""
        return tuple({id(ref.tensor): codec for ref, codec in encoded(self.refs)}.values())

    def restore(self) -> None:
        """Give the modules back the host's tensors."""
        for ref in self.refs:
            ref.restore()


@dataclass(eq=False)
class Division:
    """The weights of a module: its groups, the tables of embeddings, whose rows are looked up in RAM, and the rest."""

    groups: list[GroupWeights]
    tables: list[Owner]
    rest: list[ParameterRef]

    @property
    def owners(self) -> list[Owner]:
        """The modules of all groups."""
        return [owner for group in self.groups for owner in group.owners]


def divide(module: nn.Module, host_refs: Sequence[ParameterRef], calls: CallOrder) -> Division:
    """Divide a module that is to be placed; the groups are in the order of their calls, `host_refs` all its weights.

    What several modules share is of the rest, unless all look up its rows; and so are weights that are not plain
    tensors, buffers that are in no file, the weights that are read elsewhere, and the few tensors that a module with
    others inside has for itself. LoRAs divide nothing anew: their tensors are of the group of their module.
    """
    weights = [ref for ref in host_refs if not ref.is_branch]
    limit, table_limit = largest_run_bytes(nbytes_of(weights)), largest_run_bytes(plain_bytes_of(weights))
    here = {(id(ref.holder), ref.key): ref for ref in host_refs}
    owners = [
        Owner(path, owner, [here[id(ref.holder), ref.key] for ref in own])
        for path, owner, own in _owners(module, calls)
        if path not in calls.outside
    ]
    holders = Counter(key for owner in owners for key in {id(ref.tensor) for ref in owner.refs})
    taken = {id(ref) for owner in owners for ref in owner.refs}
    holders.update(id(ref.tensor) for ref in host_refs if id(ref) not in taken)
    looked_up = [owner for owner in owners if _is_table(owner, table_limit)]
    of_tables = Counter(id(owner.refs[0].tensor) for owner in looked_up)
    tables = [owner for owner in looked_up if holders[key := id(owner.refs[0].tensor)] == of_tables[key]]
    plain = [o for o in owners if all(holders[id(s.tensor)] == 1 and can_pack(s.tensor) for s in o.refs)]
    first, others = _FirstCalls(calls.order), [owner for owner in plain if owner not in tables]
    places = {owner.path: place for owner in others if (place := first.of(owner.path)) is not None}
    called = sorted((owner for owner in others if owner.path in places), key=lambda owner: places[owner.path])
    idle = [owner for owner in others if owner.path not in places]
    groups = [_group(some, run is called) for run in (called, idle) for some in _cut(run, limit)]
    groups = [group for group in groups if group.packed_bytes]
    beside = {
        owner.path: [here[id(s.holder), s.key] for s in parameter_refs(owner.module) if s.is_branch] for owner in others
    }
    for group in groups:
        _add_branches(group, [ref for owner in group.owners for ref in beside[owner.path]])
    moving = {id(ref) for own in (*(t.refs for t in tables), *(p.refs for p in groups)) for ref in own}
    return Division(groups, tables, [ref for ref in host_refs if id(ref) not in moving])


def largest_run_bytes(total_bytes: int) -> int:
    """Return how large a group of several modules may be, of so many bytes of weights.

    A module that is larger is alone.
    """
    return max(total_bytes // _MOST_PIECES, min(LARGE_BYTES, total_bytes // _LEAST_PIECES), 1)


def unique(own: Sequence[ParameterRef]) -> list[torch.Tensor]:
    """Return the tensors of places, each once."""
    return list({id(ref.tensor): ref.tensor for ref in own}.values())


def nbytes_of(own: Sequence[ParameterRef]) -> int:
    """Return the bytes of the tensors in places; shared ones count once."""
    return sum(tensor.nbytes for tensor in unique(own))


def encoded(own: Sequence[ParameterRef]) -> list[tuple[ParameterRef, Codec]]:
    """Return the places of encoded parameters, each with how it is stored."""
    return [(ref, codec) for ref in own if (codec := ref.codec)]


def plain_bytes_of(own: Sequence[ParameterRef]) -> int:
    """Return the bytes of the tensors in places when all are decoded; shared ones count once."""
    return sum({id(ref.tensor): ref.plain_bytes for ref in own}.values())


def workspace_bytes(owners: Sequence[Owner]) -> int:
    """Return what the decoded weights of any one of the modules take at most, each at an aligned byte."""
    decoded = ({id(ref.tensor): codec.decoded_bytes for ref, codec in encoded(owner.refs)} for owner in owners)
    return max((sum(map(aligned, each.values())) for each in decoded), default=0)


def decoding_bytes(owners: Sequence[Owner], own: Sequence[ParameterRef]) -> tuple[tuple[str, int], ...]:
    """Return what decoding takes for a moment beside the stored bytes and the results.

    In the call of each module, by path.
    That of "" is what any one of the tensors in places takes that is decoded for good: its stored bytes leave after.
    """
    most = max((ref.tensor.nbytes + codec.workspace_bytes for ref, codec in encoded(own)), default=0)
    each = {owner.path: max((codec.workspace_bytes for _, codec in encoded(owner.refs)), default=0) for owner in owners}
    return tuple((path, nbytes) for path, nbytes in (("", most), *each.items()) if nbytes)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _owners(module: nn.Module, calls: CallOrder) -> Iterator[tuple[str, nn.Module, list[ParameterRef]]]:
    """Yield the modules that weights come for, none inside another, and the places of those weights.

    The top module's own few tensors are nobody's: its call is under way when it is placed on demand.
    """
    blocks = {id(member) for _, members in block_lists(module) for member in members}
    around = {path for path, _ in block_lists(module)}
    seen: set[int] = {id(module)}

    def walk(owner: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, list[ParameterRef]]]:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        lists = [child for child in owner.children() if not is_called(child)]  # such as of parameters, which it reads
        own = [ref for holder in (owner, *lists) for ref in _saved(holder)]
        whole = path in calls.whole or type(owner).__name__ in WHOLE_MODULES or (calls.blocks and id(owner) in blocks)
        whole |= nbytes_of(own) > _OWN_SHARE * nbytes_of([ref for ref in parameter_refs(owner) if not ref.is_branch])
        if whole and is_called(owner) and not any(f"{each}.".startswith(f"{path}.") for each in around):
            parts = list(owner.modules())
            seen.update(map(id, parts))
            yield path, owner, [ref for part in parts for ref in _saved(part)]
            return
        for name, child in owner.named_children():
            yield from walk(child, f"{path}.{name}")

    for name, child in module.named_children():
        yield from walk(child, name)


def _saved(module: nn.Module) -> list[ParameterRef]:
    """Return a module's own weights, without buffers that are in no file.

    Small tables, which models read elsewhere too.
    """
    return [ref for ref in own_refs(module) if ref.key not in module._non_persistent_buffers_set]


def _is_table(owner: Owner, limit: int) -> bool:
    """Return whether it is an embedding whose rows can be looked up, and large enough to be."""
    module = owner.module
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or len(owner.refs) != 1:
        return False
    ref = owner.refs[0]
    has_rows = ref.codec is None or ref.codec.row_parts is not None
    return can_pack(ref.tensor) and has_rows and ref.plain_bytes >= limit


class _FirstCalls:
    """When each module, or one inside it, is first called, as a key to sort by.

    Of the members of a list those that were not seen to be called are thought to be, behind the last one that was, each
    with all that is inside it before the next: which experts a router chooses is not known beforehand.
    """

    def __init__(self, order: Sequence[str]) -> None:
        self.count = len(order)
        self._seen: dict[str, int] = {}
        self._alike: dict[tuple[str, ...], int] = {}
        self._last: dict[tuple[str, ...], int] = {}
        for i, path in enumerate(order):
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                self._seen.setdefault(".".join(parts[:end]), i)
            for at, alike in _with_any_index(parts):
                self._alike[alike] = self._last[alike[: at + 1]] = i

    def of(self, path: str) -> tuple[int, ...] | None:
        """Return the place in the order, None for what is never called, the same for all where there is no order."""
        if not self.count:
            return (0,)
        if path in self._seen:
            return (self._seen[path],)
        parts = path.split(".")
        for at, alike in _with_any_index(parts):
            if alike in self._alike:
                member_was_seen = ".".join(parts[: at + 1]) in self._seen
                place = self._alike[alike]
                return (place,) if member_was_seen else (self._last[alike[: at + 1]], int(parts[at]), place)
        return None


def _with_any_index(parts: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield a path with any number in the place of each one that it has, the last first, and where that is."""
    for i in reversed(range(len(parts))):
        if parts[i].isdecimal():
            yield i, (*parts[:i], "*", *parts[i + 1 :])


def _cut(owners: Sequence[Owner], limit: int) -> list[list[Owner]]:
    """Cut owners into runs of `limit` bytes, or a little more if the runs would be too many."""
    runs: list[list[Owner]] = []
    held = 0
    for owner in owners:
        size = nbytes_of(owner.refs)
        if not runs or held + size > limit:
            runs.append([])
            held = 0
        runs[-1].append(owner)
        held += size
    return runs if len(runs) <= _TOO_MANY else _cut(owners, limit * 5 // 4)


def _group(owners: list[Owner], called: bool) -> GroupWeights:
    own = [ref for owner in owners for ref in owner.refs]
    tensors = unique(own)
    packed_bytes = layout(tensors)[1]
    return GroupWeights(owners, own, packed_bytes, packed_bytes, sum(tensor.nbytes for tensor in tensors), called)


def _add_branches(group: GroupWeights, branches: list[ParameterRef]) -> None:
    """Add branches to a group, which is cut as if there were none."""
    tensors = unique(branches)
    group.refs += branches
    group.packed_bytes += layout(tensors)[1]
    group.held_bytes += sum(tensor.nbytes for tensor in tensors)
