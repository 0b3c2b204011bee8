"""Weights that are more than the bytes of their elements: in every placement they stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ballast.memory import ManagedModel
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.forecast import Operations
from ballast.memory.planning.planner import make_plan
from ballast.memory.planning.room import Room
from ballast.memory.rates import ASSUMED
from streamed_models import resident_engine, streamed_engine
from torch import nn
from torch.utils._pytree import tree_map

CPU = torch.device("cpu")  # the simulated device's tensors are a subclass themselves, and do not mix with others


class Scaled(torch.Tensor):
    """Eight bits and a scale, in the manner of torchao: made outside inference mode only, decoded where it is used."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Scaled:
        scale = weight.abs().max() / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        plain = tree_map(
            lambda value: value.codes * value.scale if isinstance(value, cls) else value, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def scaled() -> nn.Module:
    module = Layers()
    for block in module.blocks:
        block.weight = nn.Parameter(Scaled.of(block.weight.detach()), requires_grad=False)
    return module


def by_torchao() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    module = Layers()
    quantization.quantize_(module.blocks, quantization.Int8WeightOnlyConfig())
    return module


def by_gguf() -> nn.Module:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    module, kind = Layers(), gguf.GGMLQuantizationType.Q8_0
    for i, block in enumerate(module.blocks):
        packed = gguf.quants.quantize(block.weight.detach().numpy(), kind)
        linear = GGUFLinear(64, 64, bias=True, compute_dtype=torch.float32)
        linear.weight, linear.bias = GGUFParameter(torch.from_numpy(packed), quant_type=kind), block.bias
        module.blocks[i] = linear
    return module


@pytest.mark.parametrize("placement", [resident_engine, streamed_engine])
@pytest.mark.parametrize("build", [scaled, by_torchao, by_gguf])
def test_quantized_weights_run_in_every_placement(build: Any, placement: Any) -> None:
    module = build().requires_grad_(False)
    kinds = [type(block.weight) for block in module.blocks]
    assert kinds[0] not in (nn.Parameter, torch.Tensor)
    x = torch.randn(3, 64)
    with torch.inference_mode():
        expected = module(x)
    before = [block.weight for block in module.blocks]
    placed = placement(module, CPU)
    with torch.inference_mode():
        placed.place()
        seen: list[type] = []
        handle = module.blocks[2].register_forward_pre_hook(lambda block, given: seen.append(type(block.weight)))
        for _ in range(2):
            torch.testing.assert_close(module(x), expected, atol=0, rtol=0)
        handle.remove()
        placed.remove()
    assert set(seen) <= {kinds[0], nn.Parameter}
    assert all(now is was for now, was in zip((block.weight for block in module.blocks), before, strict=True))


def test_what_cannot_be_streamed_says_so_in_the_plan() -> None:
    unit = ManagedModel.from_module("dit", "transformer", scaled())
    sizes = sizes_of(unit)
    assert all("head" in group.paths for group in sizes.groups)
    from ballast.memory.planning.forecast import UnitForecast

    work = UnitForecast(0, 1000, 1000, 1, Operations(1e6))
    plan = make_plan("dit", sizes, work, Room(sizes.total_bytes // 2, 2**40), ASSUMED)
    assert not plan.fits
    assert plan.reason.startswith("Nothing fits ")
