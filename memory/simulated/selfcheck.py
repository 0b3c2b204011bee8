"""Whether the simulated accelerator works on this torch: a battery of operations, compared with the CPU's results.

Torch's insides are not its interface, and change between versions; what is used of them is tried here, once in a
process. A card and a stream of its own, and a thread, in which no mode of the caller holds, leave no trace.
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
    """One line about the first thing that goes wrong on the device; None if all goes as on the CPU."""
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


# What gives the same on the device as on the CPU


def _making(device: Device) -> Result:
    like = torch.arange(6, device=device).view(2, 3)
    made = [torch.zeros(2, 3, device=device), torch.full((2,), 7.0, device=device), torch.eye(3, device=device)]
    made += [torch.tensor([[1.5, 2]], device=device), torch.linspace(0, 1, 5, device=device)]
    made += [torch.ones_like(like), torch.zeros_like(like, dtype=torch.float16), like.new_full((2,), 3)]
    return [
        *made,
        torch.empty(4, 2, dtype=torch.bfloat16, device=device).fill_(1),
        torch.ones(3, 3, device=device).tril(),
    ]


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


def _matrix_products(device: Device) -> Result:
    a, b, bias = _values(device, 2, 3, 4), _values(device, 2, 4, 5), _values(device, 5)
    products = [a @ b, torch.bmm(a, b), functional.linear(a, b[0].t(), bias), torch.addmm(bias, a[0], b[1])]
    return [*products, torch.einsum("bij,bjk->bik", a, b), torch.matmul(a, b[0]), (a.half() @ b.half()).float()]


def _convolutions(device: Device) -> Result:
    image, kernel, film = _values(device, 1, 4, 6, 6), _values(device, 8, 4, 3, 3), _values(device, 1, 2, 3, 4, 4)
    y = functional.conv2d(image, kernel, padding=1, stride=2)
    z = functional.conv3d(functional.pad(film, (1, 1, 1, 1, 2, 0)), _values(device, 2, 2, 3, 3, 3))
    up = [functional.interpolate(image, scale_factor=2.0, mode=mode) for mode in ("nearest", "bilinear")]
    return (
        y,
        z,
        *up,
        functional.conv_transpose2d(y, kernel),
        functional.pixel_shuffle(y, 2),
        functional.avg_pool2d(y, 2),
    )


def _norms_and_activations(device: Device) -> Result:
    x, scale = _values(device, 2, 4, 6), _values(device, 6)
    norms = [functional.layer_norm(x, (6,), scale, scale), functional.rms_norm(x, (6,), scale)]
    norms += [functional.group_norm(x, 2, scale[:4], scale[:4]), x.softmax(-1), functional.silu(x)]
    rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return [*norms, functional.gelu(x, approximate="tanh"), functional.dropout(x, 0.1, training=False), rms, x.norm()]


def _attention(device: Device) -> Result:
    query, key = _values(device, 1, 2, 5, 8), _values(device, 1, 2, 7, 8)
    mask = torch.ones(5, 7, dtype=torch.bool, device=device).tril()
    attend = functional.scaled_dot_product_attention
    return attend(query, key, key), attend(query, key, key, attn_mask=mask), attend(query, query, query, is_causal=True)


def _indexing(device: Device) -> Result:
    x, rows = _values(device, 5, 4), torch.tensor([3, 0, 3], device=device)
    picked = [x[rows], x[rows, rows], x[x > 0], x[[1, 2]], x[torch.tensor([0, 2])], x.gather(1, rows[None] % 4)]
    picked += [x.index_select(0, rows), functional.embedding(rows, x), torch.where(x > 0, x, -x), *x.topk(2, dim=0)]
    found = [x.argmax().item(), bool((x > 2).any()), x[0].tolist() == x.cpu()[0].tolist(), len(x), f"{x.sum():.2f}"]
    joined = [torch.cat([x, x], dim=1), torch.stack([x[0], x[1]]), x.cumsum(0), x.sort(dim=1)[0], (x > 0).nonzero()]
    return [*picked, *joined, x.repeat_interleave(2, 0), x.tile(2), x.flip(0), x.roll(1), found]


def _complex_numbers(device: Device) -> Result:
    angles = _values(device, 5, 3)
    turn = torch.polar(torch.ones_like(angles), angles)
    return (
        torch.view_as_real(torch.view_as_complex(_values(device, 5, 3, 2)) * turn),
        turn.real,
        torch.outer(angles[0], angles[1]),
    )


def _types(device: Device) -> Result:
    x = _values(device, 3, 4)
    made = [x.half().float(), x.to(torch.bfloat16), x.double(), (x * 9).to(torch.int8), x.type_as(x.int()), x.bool()]
    return [*made, (x.bfloat16() * 2 + x), x.int() + 1.5, torch.promote_types(x.dtype, torch.float64)]


def _inference_mode(device: Device) -> Result:
    outside = _values(device, 3, 4)
    with torch.inference_mode():
        inside = outside * 2
        view = outside[1:]
        inside += 1
        outside.add_(1)
    return inside.clone(), view.clone(), outside, inside.is_inference(), view.is_inference(), outside.is_inference()


def _autocast(device: Device) -> Result:
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=False):
        return _values(device, 2, 2) @ _values(device, 2, 2)


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


_COMPARED = (
    _making, _views, _writes_in_place, _matrix_products, _convolutions, _norms_and_activations, _attention, _indexing,
    _complex_numbers, _types, _inference_mode, _autocast, _modules,
)  # fmt: skip


# What the CPU has nothing to compare with


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
