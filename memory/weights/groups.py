"""Weight groups: runs of modules in call order, which stream or stay on the device as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..codecs.codec import Codec
from .hostbuffer import ALIGNMENT_BYTES, can_pack, layout
from .structure import ParameterRef, block_lists, is_called, modules_in, own_refs, parameter_refs

# Modules that read their children's weights themselves: these must be in the same group.
WHOLE_MODULES = ["MultiheadAttention", "VectorQuantizer"]

LARGE_BYTES = 16 * 2**20  # of a group: larger copies are no faster
_MOST_GROUPS = 512  # groups of a large model, about: each costs the host some microseconds a call
_TOO_MANY = 560  # groups
_LEAST_GROUPS = 32  # groups of a small model
_OWN_SHARE = 0.05  # of a module's weights: with more of its own, beside its children's, it is not divided further


@dataclass(frozen=True)
class CallOrder:
    """The order in which a module calls its parts, as dry runs saw it.

    `order` has the paths of modules with weights of their own, by their first calls; empty if it is not known. `whole`
    modules read the weights of their children themselves. The weights of `outside` modules are read elsewhere than in
    their calls. With `blocks` each member of a block list is whole, which compiled blocks must be.

    Modules of `once` have weight groups of their own. The stage that `computes_once` calls only these, all others call
    only the rest.
    """

    order: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()
    blocks: bool = False
    once: frozenset[str] = frozenset()
    computes_once: bool = False


@dataclass(eq=False)
class Owner:
    """A module whose weights must be on the device while it is called, and at no other time."""

    path: str
    module: nn.Module
    refs: list[ParameterRef]


@dataclass(eq=False)
class GroupWeights:
    """A weight group: modules called one after the other, and the weights that belong to them alone.

    Buffers of LoRAs in these modules are part of the group. They follow the weights, from byte `stored_bytes` on, and
    are in no file. `called` is False for modules that no dry run saw called.
    """

    owners: list[Owner]
    refs: list[ParameterRef]
    packed_bytes: int  # of the flat buffers: all tensors, with the gaps of alignment
    stored_bytes: int  # of these, the weights without LoRA branches
    held_bytes: int  # all tensors, without gaps
    called: bool = True

    def tensors(self) -> list[torch.Tensor]:
        """Return the host's weights, buffers and LoRA branches, each once."""
        return unique(self.refs)

    def stored(self) -> list[torch.Tensor]:
        """Return the host's tensors without those of LoRA branches, each once."""
        return unique([ref for ref in self.refs if not ref.is_branch])

    def branches(self) -> list[torch.Tensor]:
        """Return the tensors of LoRA branches, each once."""
        return unique([ref for ref in self.refs if ref.is_branch])

    @property
    def plain_bytes(self) -> int:
        """Bytes of the tensors when all are dequantized."""
        return plain_bytes_of(self.refs)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs of the encoded tensors, one for each."""
        return tuple({id(ref.tensor): codec for ref, codec in encoded(self.refs)}.values())

    def restore(self) -> None:
        """Give the modules the host's tensors back."""
        for ref in self.refs:
            ref.restore()


@dataclass(eq=False)
class Division:
    """The weights of a module: its groups, its embedding tables, whose rows are looked up in RAM, and the rest."""

    groups: list[GroupWeights]
    tables: list[Owner]
    rest: list[ParameterRef]

    @property
    def owners(self) -> list[Owner]:
        """The modules of all groups."""
        return [owner for group in self.groups for owner in group.owners]


def divide(module: nn.Module, host_refs: Sequence[ParameterRef], calls: CallOrder) -> Division:
    """Divide a module into weight groups in call order, embedding tables, and the rest, which stays resident.

    `host_refs` are all its parameters and buffers. These are of the rest:

    - weights that several modules share, unless all of them are embeddings that look up rows
    - tensor subclasses, buffers that are in no file, and weights of `calls.outside`
    - the few tensors that a module with children holds itself

    Groups of `calls.once` or of the others, whichever this stage does not call, come behind those that it does.
    LoRAs do not change the division: their tensors join the group of their module. Modules that were not seen to be
    called form groups of their own, behind the others.
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
    once, rest = ([owner for owner in called if (owner.path in calls.once) is each] for each in (True, False))
    used, unused = (once, rest) if calls.computes_once else (rest, once)
    groups = [_group(some, run is used) for run in (used, unused, idle) for some in _cut(run, limit)]
    groups = [group for group in groups if group.packed_bytes]
    beside = {
        owner.path: [here[id(s.holder), s.key] for s in parameter_refs(owner.module) if s.is_branch] for owner in others
    }
    for group in groups:
        _add_branches(group, [ref for owner in group.owners for ref in beside[owner.path]])
    moving = {id(ref) for own in (*(t.refs for t in tables), *(p.refs for p in groups)) for ref in own}
    return Division(groups, tables, [ref for ref in host_refs if id(ref) not in moving])


def embedding_tables(module: nn.Module) -> list[Owner]:
    """Return the embedding tables of a module, as `divide` finds them."""
    if not any(isinstance(owner, nn.Embedding) for owner in modules_in(module)):
        return []
    return divide(module, list(parameter_refs(module)), CallOrder()).tables


def largest_run_bytes(total_bytes: int) -> int:
    """Return the limit for a group of several modules, of a module with `total_bytes` of weights.

    16 MB for 0.5 to 8 GB of weights; 1/32 of less, 1/512 of more. A module that is larger is a group alone.
    """
    return max(total_bytes // _MOST_GROUPS, min(LARGE_BYTES, total_bytes // _LEAST_GROUPS), 1)


def unique(own: Sequence[ParameterRef]) -> list[torch.Tensor]:
    """Return the host's tensors of the references, each once."""
    return list({id(ref.tensor): ref.tensor for ref in own}.values())


def nbytes_of(own: Sequence[ParameterRef]) -> int:
    """Return the bytes of the host's tensors; shared ones count once."""
    return sum(tensor.nbytes for tensor in unique(own))


def encoded(own: Sequence[ParameterRef]) -> list[tuple[ParameterRef, Codec]]:
    """Return the references to encoded parameters, each with its codec."""
    return [(ref, codec) for ref in own if (codec := ref.codec)]


def plain_bytes_of(own: Sequence[ParameterRef]) -> int:
    """Return the bytes of the tensors when all are dequantized; shared ones count once."""
    return sum({id(ref.tensor): ref.plain_bytes for ref in own}.values())


def workspace_bytes(owners: Sequence[Owner]) -> int:
    """Return the bytes of the dequantized weights of one module, each aligned: the most of all `owners`."""
    decoded = ({id(ref.tensor): codec.decoded_bytes for ref, codec in encoded(owner.refs)} for owner in owners)
    return max((sum(map(aligned, each.values())) for each in decoded), default=0)


def decoding_bytes(owners: Sequence[Owner], own: Sequence[ParameterRef]) -> tuple[tuple[str, int], ...]:
    """Return the transient bytes of dequantizing, beside the stored bytes and the results, as (path, bytes).

    Each module's path has the most that one of its weights takes in its call. The path "" has the most that one of
    `own` takes when it is to be kept dequantized: its stored bytes count there too, since they are freed only
    afterwards.
    """
    most = max((ref.tensor.nbytes + codec.workspace_bytes for ref, codec in encoded(own)), default=0)
    each = {owner.path: max((codec.workspace_bytes for _, codec in encoded(owner.refs)), default=0) for owner in owners}
    return tuple((path, nbytes) for path, nbytes in (("", most), *each.items()) if nbytes)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of host buffers."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _owners(module: nn.Module, calls: CallOrder) -> Iterator[tuple[str, nn.Module, list[ParameterRef]]]:
    """Yield the modules that weights are brought for, none inside another, and the references to those weights.

    The top module itself is left out: its call is under way already when its unit is placed on demand.
    """
    lists = block_lists(module)
    blocks = {id(member) for _, members in lists for member in members}
    around = {path for path, _ in lists}
    seen: set[int] = {id(module)}

    def walk(owner: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, list[ParameterRef]]]:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        children = [child for child in owner.children() if not is_called(child)]  # e.g. a ParameterList, which it reads
        own = [ref for holder in (owner, *children) for ref in _saved(holder)]
        whole = path in calls.whole or type(owner).__name__ in WHOLE_MODULES or (calls.blocks and id(owner) in blocks)
        whole = whole or _holds_most(owner, own)
        if whole and is_called(owner) and not any(f"{each}.".startswith(f"{path}.") for each in around):
            parts = list(modules_in(owner))
            seen.update(map(id, parts))
            yield path, owner, [ref for part in parts for ref in _saved(part)]
            return
        for name, child in owner.named_children():
            yield from walk(child, f"{path}.{name}")

    for name, child in module.named_children():
        yield from walk(child, name)


def _holds_most(owner: nn.Module, own: Sequence[ParameterRef]) -> bool:
    """Return whether a module holds most of its weights itself."""
    nbytes = nbytes_of(own)
    return nbytes > 0 and nbytes > _OWN_SHARE * nbytes_of([ref for ref in parameter_refs(owner) if not ref.is_branch])


def _saved(module: nn.Module) -> list[ParameterRef]:
    """Return references to a module's own weights, without buffers that are in no file.

    Such buffers are small tables, which models also read outside the module.
    """
    return [ref for ref in own_refs(module) if ref.key not in module._non_persistent_buffers_set]


def _is_table(owner: Owner, limit: int) -> bool:
    """Return whether a module is an embedding of at least `limit` plain bytes whose rows can be looked up."""
    module = owner.module
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or len(owner.refs) != 1:
        return False
    ref = owner.refs[0]
    has_rows = ref.codec is None or ref.codec.row_parts is not None
    return can_pack(ref.tensor) and has_rows and ref.plain_bytes >= limit


class _FirstCalls:
    """Sort keys for modules: when each, or one inside it, is first called.

    Members of a list that were not seen to be called come behind the last one that was, one member after the other. A
    dry run does not tell which experts a router will choose.
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
        """Return the sort key of a module; None if it is never called. Without an order all keys are the same."""
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
    """Yield the path with each of its numbers replaced by "*" in turn, the last first, and the position of that number.

    For example "blocks.3.attn" gives (1, ("blocks", "*", "attn")).
    """
    for i in reversed(range(len(parts))):
        if parts[i].isdecimal():
            yield i, (*parts[:i], "*", *parts[i + 1 :])


def _cut(owners: Sequence[Owner], limit: int) -> list[list[Owner]]:
    """Cut modules into runs of at most `limit` bytes. A larger module is a run alone.

    As long as there are more than `_TOO_MANY` runs, the limit is raised by a quarter.
    """
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
    """Return the weight group of some modules, without LoRA branches."""
    own = [ref for owner in owners for ref in owner.refs]
    tensors = unique(own)
    packed_bytes = layout(tensors)[1]
    return GroupWeights(owners, own, packed_bytes, packed_bytes, sum(tensor.nbytes for tensor in tensors), called)


def _add_branches(group: GroupWeights, branches: list[ParameterRef]) -> None:
    """Add LoRA branches to a group, which is cut as if there were none."""
    tensors = unique(branches)
    group.refs += branches
    group.packed_bytes += layout(tensors)[1]
    group.held_bytes += sum(tensor.nbytes for tensor in tensors)
