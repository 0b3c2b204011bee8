"""The simulated accelerator behaves as a torch device does."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ballast.memory import simulated
from safetensors.torch import load_file, save_file

if simulated.supported():
    pytest.skip(simulated.supported() or "", allow_module_level=True)

MB = 2**20


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """A fresh card of 64 MB, empty before and after."""
    gc.collect()
    simulated.enable("64MB")
    before = simulated.stats().allocated_bytes
    yield
    gc.collect()
    assert simulated.stats().allocated_bytes == before


def held() -> int:
    return simulated.stats().allocated_bytes


def test_devices_do_not_mix() -> None:
    x = torch.arange(4.0, device="sim")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device.* sim:0 and cpu"):
        x + torch.ones(4)
    with pytest.raises(RuntimeError):
        torch.ones(4).add_(x)
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(torch.ones(1, 4), x[None])
    with pytest.raises(NotImplementedError, match="meta"):
        torch.ones(1, device="meta").to("sim")
    with pytest.raises(RuntimeError, match="only sim:0"):
        torch.ones(1, device="sim:1")
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3, 4], "a scalar of the CPU may come along"
    assert x[torch.tensor([1, 3])].tolist() == [1, 3]
    x[torch.tensor([0])] = 9
    assert x.tolist() == [9, 1, 2, 3]


def test_reading_values() -> None:
    x = torch.tensor([1.5, 2.5], device="sim")
    assert x.device == torch.device("sim:0") and x.is_sim and not x.is_cuda
    assert x[0].item() == 1.5 and x.tolist() == [1.5, 2.5] and float(x[1]) == 2.5
    assert repr(x) == "tensor([1.5000, 2.5000], device='sim:0')" and f"{x[0]:.2f}" == "1.50"
    assert torch.linspace(0, 1, 3, device="sim").tolist() == [0, 0.5, 1]
    assert torch.equal(x, x.clone()) and x.nonzero().tolist() == [[0], [1]]
    assert x[x > 2].tolist() == [2.5]
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        x.numpy()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 3), lambda: torch.ones(2), lambda: torch.full((2,), 7), lambda: torch.eye(3),
        lambda: torch.arange(1, 2, 0.5), lambda: torch.logspace(0, 1, 3),
        lambda: torch.arange(5), lambda: torch.ones(3, 3).tril(), lambda: torch.tril_indices(3, 3),
        lambda: torch.tensor([1, 2]), lambda: torch.as_tensor([1.0]), lambda: torch.randn(4),
        lambda: torch.rand(4), lambda: torch.randint(9, (4,)), lambda: torch.randperm(6),
        lambda: torch.hann_window(6), lambda: torch.zeros_like(torch.ones(2)),
        lambda: torch.ones(2).new_zeros(3), lambda: torch.empty_strided((2, 2), (1, 2)).fill_(1),
        lambda: torch.ones(2, dtype=torch.bfloat16), lambda: torch.scalar_tensor(2.0),
        lambda: torch.randn(4, generator=torch.Generator().manual_seed(3)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_factories_under_a_device_context(make: Any, mode: Any) -> None:
    with mode():
        torch.manual_seed(1)
        expected = make()
        torch.manual_seed(1)
        with torch.device("sim"):
            made = make()
        assert made.device.type == "sim" and made.dtype == expected.dtype
        assert made.stride() == expected.stride() and torch.equal(made.cpu(), expected)


def test_writing_in_place_is_told_by_the_schema() -> None:
    x = torch.tensor([True, False], device="sim")
    y = x & torch.tensor([True, True], device="sim")
    assert y is not x and x.tolist() == [True, False]
    z = torch.zeros(2, device="sim")
    assert z.add_(1) is z and z.tolist() == [1, 1]
    out = torch.empty(2, device="sim")
    assert torch.add(z, 1, out=out) is out and out.tolist() == [2, 2]
    z[0] = 5
    assert z.tolist() == [5, 1]
    with pytest.raises(NotImplementedError, match="shape in place"):
        z.unsqueeze_(0)


def test_tensors_from_outside_inference_mode_work_inside() -> None:
    layer = torch.nn.Linear(4, 4).to("sim")
    x = torch.ones(2, 4, device="sim")
    with torch.inference_mode():
        inside = layer(x.view(1, 2, 4)).reshape(8)
        weight = layer.weight.t()
        assert inside.is_inference() and not weight.is_inference()
        assert torch.equal(x.to("sim"), x) and x.contiguous() is x
        del weight
    torch.testing.assert_close(inside.cpu(), layer.cpu()(x.cpu()).detach().reshape(8))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attention_allocates_only_its_output(mode: Any) -> None:
    with mode():
        query = torch.randn(1, 2, 512, 8, device="sim")
        simulated.reset_stats()
        before = held()
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        assert simulated.stats().peak_bytes - before == out.nbytes
        raw = query.cpu()
        expected = torch.nn.functional.scaled_dot_product_attention(raw, raw, raw)
        torch.testing.assert_close(out.cpu(), expected)


def test_gradients_equal_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    other = copy.deepcopy(layer).to("sim")
    x = torch.randn(1, 3, 8)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    other(*[x.to("sim")] * 3, need_weights=False)[0].sum().backward()
    for one, two in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad.cpu())


def test_parameters_modules_and_files(tmp_path: Any) -> None:
    layer = torch.nn.Linear(3, 3)
    state = layer.state_dict()
    there = copy.deepcopy(layer).to("sim")
    assert isinstance(there.weight, torch.nn.Parameter) and there.weight.requires_grad
    # accelerate makes parameters anew by calling their type
    again = type(there.weight)(there.weight, requires_grad=False)
    assert isinstance(again, torch.nn.Parameter) and again.is_sim and not again.requires_grad
    assert type(there.weight)(torch.ones(1), requires_grad=False).device.type == "cpu"
    twin = copy.deepcopy(there)
    assert twin.weight.is_sim and isinstance(twin.weight, torch.nn.Parameter)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(there.weight.cpu(), layer.weight)
    twin.load_state_dict(state)
    assert torch.equal(twin.weight.cpu(), layer.weight)
    twin.load_state_dict({key: value.to("sim") for key, value in state.items()}, assign=True)
    save_file(there.state_dict(), tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["weight"].to("sim").cpu(), layer.weight)
    assert torch.equal(pickle.loads(pickle.dumps(there.weight)).cpu(), layer.weight)  # noqa: S301
    weight = there.weight
    weight.data = torch.zeros(3, 3, device="sim")
    assert there.weight is weight and not weight.any()
    weight.data = torch.ones(2)
    assert weight.tolist() == [1, 1] and weight.device.type == "cpu" and isinstance(weight, torch.nn.Parameter)
    assert twin.to_empty(device="meta").weight.is_meta


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_may_be_views_into_one_buffer(mode: Any) -> None:
    with mode():
        layer = torch.nn.Linear(4, 4).to(torch.bfloat16)
        x = torch.randn(2, 4, dtype=torch.bfloat16)
        expected = layer(x)
        flat = torch.cat([layer.weight.view(-1), layer.bias]).view(torch.uint8)
        slot = torch.empty(64, dtype=torch.uint8, device="sim")
        before = held()
        slot[: flat.nbytes].copy_(flat, non_blocking=True)
        layer.weight = torch.nn.Parameter(slot[:32].view(torch.bfloat16).view(4, 4), requires_grad=False)
        layer.bias = torch.nn.Parameter(slot[32:40].view(torch.bfloat16), requires_grad=False)
        assert held() == before and layer.weight.data_ptr() == slot.data_ptr()
        torch.testing.assert_close(layer(x.to("sim")).cpu(), expected)


def test_shared_parameters_stay_shared() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    weight = model[1].weight = model[0].weight
    before = held()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            model.to("sim")
            assert held() - before == 256
            assert model[0].weight is model[1].weight is weight and weight.is_sim
            model.to("sim", torch.float16)
            assert held() - before == 128
            model.to("cpu", torch.float32)
            assert held() == before and model[0].weight is model[1].weight is weight
            assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad


def test_the_device_module_has_what_libraries_ask_for() -> None:
    module = torch.get_device_module("sim")
    assert module is torch.sim and module.is_available() and module.device_count() == 1
    with module.device("sim:0"):
        assert module.current_device() == 0
    assert module.get_device_properties(0).total_memory == 64 * MB and module.get_device_name()
    assert module.is_bf16_supported() and torch.bfloat16 in module.get_amp_supported_dtype()
    module.manual_seed(5)
    first = torch.rand(2, device="sim")
    state = module.get_rng_state()
    second = torch.rand(2, device="sim")
    module.set_rng_state(state)
    assert torch.equal(torch.rand(2, device="sim"), second)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2, device="sim"), first)
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and not torch.ones(3).is_pinned() and pinned.tolist() == [1, 1, 1]
    module.empty_cache()
