"""Check that the simulated accelerator works on this torch.

Torch's internals are not a public interface, and change between versions. Six checks run once in a process. Views,
writes in place and modules are compared with the CPU; then come copies, bytes, and streams with events. They run on
their own card, stream and thread, so that they leave no trace. Tests compare many more operations.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import card as state
from .clock import Event, Stream, current_stream
from .dry import one_at_a_time

_CARD_BYTES = 2**20
_RATE = 1e6  # bytes a second each way, and operations a second

Device = str | torch.device
Result = Any  # tensors, or plain values, in lists and tuples


def first_failure(device: torch.device) -> str | None:
    """Return one line about the first check that fails on the device, or None."""
    found: list[str | None] = []
    with one_at_a_time:
        outer, card = state.card, state.Card(_CARD_BYTES, device)
        card.configure(_CARD_BYTES, 0, _RATE, _RATE, _RATE)
        state.card = card
        try:
            thread = threading.Thread(target=lambda: found.append(_try_all(device)), name="ballast-selfcheck")
            thread.start()
            thread.join()
        finally:
            state.card = outer
    return found[0]


def _try_all(device: torch.device) -> str | None:
    with Stream():
        for check in (*_COMPARED, *_ON_THE_DEVICE):
            name = check.__name__.strip("_").replace("_", " ")
            try:
                if check in _COMPARED:
                    with torch.no_grad():
                        _compare(check(device), check("cpu"))
                else:
                    check(device)
                if left := state.card.allocated_bytes():
                    return f"{name}: {left} bytes stay when all is gone"
            except Exception as error:
                reason = str(error).strip().splitlines() or [""]
                return f"{name}: {type(error).__name__}: {reason[0][:200]}"
    return None


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ArithmeticError(what)


def _compare(found: Result, wanted: Result) -> None:
    if isinstance(wanted, (list, tuple)):
        _expect(isinstance(found, (list, tuple)) and len(found) == len(wanted), "another number of results")
        for mine, theirs in zip(found, wanted, strict=True):
            _compare(mine, theirs)
    elif isinstance(wanted, torch.Tensor):
        _expect(isinstance(found, torch.Tensor) and found.device == state.card.device, "a result lies elsewhere")
        same = found.dtype == wanted.dtype and found.shape == wanted.shape and found.stride() == wanted.stride()
        _expect(same, "another type, shape or layout than on the CPU")
        _expect(torch.allclose(found.cpu(), wanted, rtol=1e-5, atol=1e-6), "other values than on the CPU")
    else:
        _expect(found == wanted, "another value than on the CPU")


def _values(device: Device, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu").sin().view(shape).to(device)


# Checks that compare the device with the CPU


def _views(device: Device) -> Result:
    x = _values(device, 4, 6)
    parts = [x.t(), x[1:3, ::2], x.view(2, 12), x.reshape(-1), x.unsqueeze(1).expand(4, 3, 6), x.permute(1, 0)[2]]
    parts += [
        *x.chunk(2, dim=1),
        *x.split([1, 3]),
        x.unflatten(1, (2, 3)).transpose(0, 2),
        x.flatten(),
        x.narrow(0, 1, 2),
    ]
    return [*parts, x.unbind()[3], x.t().contiguous(), x.view(torch.int32), x.as_strided((3, 2), (6, 1), 1)]


def _writes_in_place(device: Device) -> Result:
    x, mask = _values(device, 4, 6), _values(device, 4, 6) > 0
    x[1:3] += 1
    x[:, 0] = 5
    x.mul_(2).clamp_(max=4).masked_fill_(mask, -1)
    x[torch.tensor([0, 3])] = _values(device, 2, 6)
    x[mask] = 0.5
    x.t().copy_(x.clone().view(6, 4))
    out = torch.empty(4, 6, device=device)
    torch.add(x, 1, out=out)
    return x, out, x.index_add_(0, torch.tensor([1, 1], device=device), _values(device, 2, 6))


def _modules(device: Device) -> Result:
    module: Any = nn.Module()
    module.weight = nn.Parameter(_values("cpu", 4, 3), requires_grad=False)
    module.tied = module.weight
    module.register_buffer("scale", _values("cpu", 3))
    before = module.weight
    module.to(device)
    same = module.weight is module.tied is before, isinstance(module.weight, nn.Parameter)
    kept = module.weight.clone(), module.scale.clone()
    module.load_state_dict({"weight": kept[0] + 1, "tied": kept[0] + 1, "scale": kept[1]})
    moved = module.weight.clone()
    module.weight.data = kept[0]
    replaced = module.weight.clone()
    module.to("cpu")
    return same, kept, moved, replaced, module.weight.device.type, [name for name, _ in module.named_parameters()]


_COMPARED = (_views, _writes_in_place, _modules)


# Checks of the device alone


def _copies(device: Device) -> None:
    state.card.reset()
    here = _values("cpu", 10)
    there = here.to(device, non_blocking=True)
    _expect(there.device == state.card.device and not here.device.index, "a copy lies elsewhere")
    back = torch.empty(10, dtype=torch.float64, device="cpu").copy_(there)
    there.copy_(here.flip(0))
    _expect(torch.equal(back.float(), here) and torch.equal(there.to("cpu"), here.flip(0)), "a copy has other values")
    stats = state.card.stats()
    moved = stats.h2d_bytes, stats.h2d_count, stats.d2h_bytes, stats.d2h_count
    _expect(moved == (80, 2, 120, 2), f"copies are counted as {moved}")
    _expect(here.pin_memory().is_pinned() and not here.is_pinned(), "pinned memory is not told from other")


def _bytes(device: Device) -> None:
    x = torch.empty(1000, dtype=torch.float16, device=device)
    y = x[10:20].view(2, 5)
    del x
    _expect(state.card.allocated_bytes() == 2000, "a storage is not charged once, for as long as a view of it lives")
    z = y + 1
    _expect(state.card.allocated_bytes() == 2020, "a result is not charged")
    del y, z
    _expect(state.card.allocated_bytes() == 0, "bytes are not given back")
    query = _values(device, 1, 1, 256, 4)
    state.card.reset_peak()
    with torch.inference_mode():
        functional.scaled_dot_product_attention(query, query, query)
    _expect(state.card.peak_bytes() == 2 * query.nbytes, "attention is charged for its scores")
    with torch.inference_mode(), torch.no_grad():
        try:
            torch.zeros(_CARD_BYTES, device=device)
        except torch.OutOfMemoryError:
            return
    raise ArithmeticError("memory has no end")


def _streams_and_events(device: Device) -> None:
    slot, weight = torch.zeros(1000, device=device), torch.zeros(1000)
    state.card.reset()
    main, side, start, done = current_stream(), Stream(), Event(enable_timing=True), Event(enable_timing=True)
    with side:
        start.record()
        slot.copy_(weight, non_blocking=True)
        done.record()
    _expect(not done.query() and main.query(), "a copy is not on its own stream")
    _expect(abs(start.elapsed_time(done) - 4.0) < 1e-6, "a copy takes another time than its bytes")
    main.wait_event(done)
    with torch.inference_mode():
        torch.mm(slot.view(50, 20), slot.view(20, 50))
    main.synchronize()
    stats = state.card.stats()
    _expect(abs(stats.compute_seconds - 0.1) < 1e-6, "a product takes another time than its operations")
    _expect(stats.hazards == 0, "an order that events give is not seen")


# Not gradients: they would leave the threads of the autograd engine, which no run of ours starts.
_ON_THE_DEVICE = (_copies, _bytes, _streams_and_events)
