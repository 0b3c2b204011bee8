"""Operations on the simulated accelerator give what they give on the CPU: values, types, shapes and layouts."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.simulated import card as state
from ballast.memory.simulated import tensor
from torch.nn import functional

Device = str | torch.device
Result = Any  # tensors, or plain values, in lists and tuples
aten = torch.ops.aten


def expect_equal(found: Result, wanted: Result) -> None:
    if isinstance(wanted, (list, tuple)):
        assert isinstance(found, (list, tuple)) and len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            expect_equal(mine, theirs)
    elif isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor) and found.device == state.card.device
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-6)
    else:
        assert found == wanted


def values(device: Device, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu").sin().view(shape).to(device)


def making(device: Device) -> Result:
    like = torch.arange(6, device=device).view(2, 3)
    made = [torch.zeros(2, 3, device=device), torch.full((2,), 7.0, device=device), torch.eye(3, device=device)]
    made += [torch.tensor([[1.5, 2]], device=device), torch.linspace(0, 1, 5, device=device)]
    made += [torch.ones_like(like), torch.zeros_like(like, dtype=torch.float16), like.new_full((2,), 3)]
    return [
        *made,
        torch.empty(4, 2, dtype=torch.bfloat16, device=device).fill_(1),
        torch.ones(3, 3, device=device).tril(),
    ]


def matrix_products(device: Device) -> Result:
    a, b, bias = values(device, 2, 3, 4), values(device, 2, 4, 5), values(device, 5)
    products = [a @ b, torch.bmm(a, b), functional.linear(a, b[0].t(), bias), torch.addmm(bias, a[0], b[1])]
    return [*products, torch.einsum("bij,bjk->bik", a, b), torch.matmul(a, b[0]), (a.half() @ b.half()).float()]


def convolutions(device: Device) -> Result:
    image, kernel, film = values(device, 1, 4, 6, 6), values(device, 8, 4, 3, 3), values(device, 1, 2, 3, 4, 4)
    y = functional.conv2d(image, kernel, padding=1, stride=2)
    z = functional.conv3d(functional.pad(film, (1, 1, 1, 1, 2, 0)), values(device, 2, 2, 3, 3, 3))
    up = [functional.interpolate(image, scale_factor=2.0, mode=mode) for mode in ("nearest", "bilinear")]
    return (
        y,
        z,
        *up,
        functional.conv_transpose2d(y, kernel),
        functional.pixel_shuffle(y, 2),
        functional.avg_pool2d(y, 2),
    )


def norms_and_activations(device: Device) -> Result:
    x, scale = values(device, 2, 4, 6), values(device, 6)
    norms = [functional.layer_norm(x, (6,), scale, scale), functional.rms_norm(x, (6,), scale)]
    norms += [functional.group_norm(x, 2, scale[:4], scale[:4]), x.softmax(-1), functional.silu(x)]
    rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return [*norms, functional.gelu(x, approximate="tanh"), functional.dropout(x, 0.1, training=False), rms, x.norm()]


def attention(device: Device) -> Result:
    query, key = values(device, 1, 2, 5, 8), values(device, 1, 2, 7, 8)
    mask = torch.ones(5, 7, dtype=torch.bool, device=device).tril()
    attend = functional.scaled_dot_product_attention
    return attend(query, key, key), attend(query, key, key, attn_mask=mask), attend(query, query, query, is_causal=True)


def indexing(device: Device) -> Result:
    x, rows = values(device, 5, 4), torch.tensor([3, 0, 3], device=device)
    picked = [x[rows], x[rows, rows], x[x > 0], x[[1, 2]], x[torch.tensor([0, 2])], x.gather(1, rows[None] % 4)]
    picked += [x.index_select(0, rows), functional.embedding(rows, x), torch.where(x > 0, x, -x), *x.topk(2, dim=0)]
    found = [x.argmax().item(), bool((x > 2).any()), x[0].tolist() == x.cpu()[0].tolist(), len(x), f"{x.sum():.2f}"]
    joined = [torch.cat([x, x], dim=1), torch.stack([x[0], x[1]]), x.cumsum(0), x.sort(dim=1)[0], (x > 0).nonzero()]
    return [*picked, *joined, x.repeat_interleave(2, 0), x.tile(2), x.flip(0), x.roll(1), found]


def complex_numbers(device: Device) -> Result:
    angles = values(device, 5, 3)
    turn = torch.polar(torch.ones_like(angles), angles)
    return (
        torch.view_as_real(torch.view_as_complex(values(device, 5, 3, 2)) * turn),
        turn.real,
        torch.outer(angles[0], angles[1]),
    )


def types(device: Device) -> Result:
    x = values(device, 3, 4)
    made = [x.half().float(), x.to(torch.bfloat16), x.double(), (x * 9).to(torch.int8), x.type_as(x.int()), x.bool()]
    return [*made, (x.bfloat16() * 2 + x), x.int() + 1.5, torch.promote_types(x.dtype, torch.float64)]


def inference_mode(device: Device) -> Result:
    outside = values(device, 3, 4)
    with torch.inference_mode():
        inside = outside * 2
        view = outside[1:]
        inside += 1
        outside.add_(1)
    return inside.clone(), view.clone(), outside, inside.is_inference(), view.is_inference(), outside.is_inference()


def autocast(device: Device) -> Result:
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=False):
        return values(device, 2, 2) @ values(device, 2, 2)


OPERATIONS = (
    making, matrix_products, convolutions, norms_and_activations, attention, indexing, complex_numbers, types,
    inference_mode, autocast,
)  # fmt: skip


@pytest.mark.parametrize("operations", OPERATIONS, ids=lambda each: each.__name__)
def test_results_are_the_cpus(operations: Callable[[Device], Result], sim: ModuleType) -> None:
    with torch.no_grad():
        expect_equal(operations(state.card.device), operations("cpu"))
    assert state.card.allocated_bytes() == 0


def doubled(func: Any) -> Callable[..., Any]:
    def handler(_: Any, args: tuple, kwargs: dict) -> Any:
        return tensor.wrap(func(*(tensor.raw_of(arg, func) for arg in args), **kwargs) * 2)

    return handler


def test_a_wrong_kernel_is_seen(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tensor.handlers, aten.bmm.default, doubled(aten.bmm.default))
    with pytest.raises(AssertionError):
        expect_equal(matrix_products(state.card.device), matrix_products("cpu"))


def test_indices_come_to_a_tensor_on_the_cpu_that_is_written(sim: ModuleType) -> None:
    """As with a real card: torch brings them there."""
    written = torch.zeros(4)
    written[torch.tensor([1, 3]).to("sim")] = 2.0
    assert written.tolist() == [0.0, 2.0, 0.0, 2.0]
