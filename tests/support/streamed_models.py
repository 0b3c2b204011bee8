"""Modules to stream: blocks of linear layers, and tiny real models with the arguments of one call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ballast.memory.engine.engine import Engine
from ballast.memory.engine.pending_reads import NOTHING, PendingReads
from ballast.memory.engine.placement import Placement
from ballast.memory.planning.fit import sizes_in, sizes_of, streamed_layout
from ballast.memory.planning.solver import Layout, Loads, place
from ballast.memory.vocabulary import PlacementName
from ballast.memory.weights import direct, hostbuffer
from ballast.memory.weights.groups import CallOrder, divide
from ballast.memory.weights.stored import Stored, stored_tensors
from ballast.memory.weights.structure import parameter_refs
from ballast.memory.weights.unit import ManagedModel
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel, T5Config, T5EncoderModel

SIM = "sim:0"  # a device only once the fixture has made it one


WIDTH = 64


class Block(nn.Module):
    """Two layers; may raise, wait for the device or call something in its middle."""

    def __init__(self, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False, dtype=dtype)
        self.down = nn.Linear(width, width, bias=False)
        self.middle: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(x.to(self.up.weight.dtype))).to(x.dtype)
        if self.middle:
            self.middle()
        return x + self.down(inner)


class Blocks(nn.Module):
    """Equal blocks, and nothing else that computes; called in another order or with some left out if told so."""

    def __init__(self, count: int = 16, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        for i in range(len(self.blocks)) if order is None else order:
            x = self.blocks[i](x)
        return x * self.scale[: x.shape[-1]] if x.shape[-1] == WIDTH else x


def nbytes(module: nn.Module) -> int:
    return sum(t.nbytes for t in {id(t): t for t in (*module.parameters(), *module.buffers())}.values())


def budget(module: nn.Module, share: float) -> int:
    """The least that can be, and a share of the rest."""
    least = least_bytes(module)
    return least + int(share * (nbytes(module) - least))


def least_bytes(module: nn.Module, calls: CallOrder | None = None) -> int:
    """The least weights on the device that a module streams in."""
    return sizes_in(module, calls).least_streamed_bytes


def streamed_engine(
    module: nn.Module,
    device: str | torch.device = SIM,
    weights_bytes: int = 0,
    source: Mapping[str, Stored] | None = None,
    calls: CallOrder | None = None,
    loads: Loads | None = None,
) -> Engine:
    """An engine that streams a module in so many bytes, 0 for the least; what is on `meta` comes from its source."""
    groups = [p for p in divide(module, list(parameter_refs(module)), calls or CallOrder()).groups if p.called]
    on_disk = frozenset(i for i, p in enumerate(groups) if source and any(s.tensor.is_meta for s in p.refs))
    loads = replace(loads or Loads.even(sizes_in(module, calls).groups), on_disk=on_disk)
    return Engine(module, torch.device(device), streamed_layout(module, weights_bytes, calls, loads), source, calls)


def resident_engine(
    module: nn.Module,
    device: str | torch.device = SIM,
    source: Mapping[str, Stored] | None = None,
    calls: CallOrder | None = None,
    loads: Loads | None = None,
    weights_bytes: int = 0,
) -> Engine:
    """An engine that keeps a module on the device, dequantized as far as so many bytes allow for calls like `loads`."""
    return Engine(module, torch.device(device), whole(module, calls, loads, weights_bytes), source, calls)


def whole(module: nn.Module, calls: CallOrder | None, loads: Loads | None, weights_bytes: int) -> Layout:
    sizes = sizes_in(module, calls)
    return place(loads or Loads.even(sizes.groups), weights_bytes - sizes.outside_bytes("resident"), "resident")


def unit_engine(unit: ManagedModel, placement: str, weights_bytes: int, incoming: PendingReads = NOTHING) -> Engine:
    """An engine of a unit; what is not in RAM comes from disk, save what is incoming."""
    loads = Loads.even(sizes_of(unit).groups)
    name: PlacementName = "resident" if placement == "resident" else "streamed"
    layout = place(loads, weights_bytes - sizes_of(unit).outside_bytes(name), name)
    source = None if unit.in_ram else unit.source()
    return Engine(unit.module, torch.device(SIM), layout, source, unit.calls, incoming=incoming)


def refit(engine: Engine, weights_bytes: int, loads: Loads) -> None:
    """Let an engine lie as one that is placed anew in so many bytes."""
    engine.apply(place(loads, weights_bytes - engine._outside_bytes, engine.layout.placement))


def planned_bytes(engine: Engine) -> int:
    """What the weights take once everything is where it shall be."""
    return engine._outside_bytes + engine.layout.device_bytes


def put(
    module: nn.Module,
    weights_bytes: int = 0,
    loads: Loads | None = None,
    source: Mapping[str, Stored] | None = None,
    calls: CallOrder | None = None,
) -> Engine:
    """The module streamed, with `rest` after each call."""
    placement = streamed_engine(module, SIM, weights_bytes, source, calls, loads)
    placement.place()
    rests(placement)
    return placement


def rests(placement: Placement) -> None:
    """Do before and after each call what the manager does, until the module is taken away."""
    before = placement.module.register_forward_pre_hook(lambda *_: placement.complete())
    after = placement.module.register_forward_hook(lambda *_: placement.end_call(), always_call=True)
    placement._undo += [before.remove, after.remove]


def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.inference_mode():
        return module(*args, **kwargs)


def noise(rows: int = 4, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(SIM)


def varied(widths: list[int]) -> Blocks:
    """Blocks of several sizes, types and with buffers, and weights outside that are larger than a block."""
    module = Blocks(0)
    module.blocks = nn.ModuleList(Block() for _ in widths)
    for i, (block, width) in enumerate(zip(module.blocks, widths, strict=True)):
        block.up = nn.Linear(WIDTH, width, bias=bool(i % 2), dtype=(torch.float32, torch.bfloat16)[i % 2])
        block.down = nn.Linear(width, WIDTH, bias=False)
        block.register_buffer("table", torch.arange(5.0) + i)
    module.extra = nn.Parameter(torch.randn(300, 170))
    return module.requires_grad_(False)


def on_disk(
    module: nn.Module, folder: Path, shards: int = 1, dtype: torch.dtype | None = None, kept: str = ""
) -> dict[str, Stored]:
    """Write the module's weights, stored as `dtype`, and put it on `meta`, but for blocks with a number in `kept`."""
    names = [name for name, _ in module.named_parameters()]
    paths = [folder / f"{i}.safetensors" for i in range(shards)]
    for i, path in enumerate(paths):
        state = {name: module.get_parameter(name).detach() for name in names[i::shards]}
        save_file({k: (v if dtype is None else v.to(dtype)).contiguous() for k, v in state.items()}, path)
    left: dict[int, torch.Tensor] = {}
    staying = {id(module.get_parameter(name)) for name in names if name.split(".")[1:2] and name.split(".")[1] in kept}
    for ref in parameter_refs(module):
        if isinstance(ref.tensor, nn.Parameter) and id(ref.tensor) not in staying:
            left.setdefault(id(ref.tensor), nn.Parameter(ref.tensor.to("meta"), requires_grad=False))
            ref.holder[ref.key] = left[id(ref.tensor)]
    return stored_tensors(paths)


def settle(placement: Engine) -> None:
    """Wait until the reader has nothing to do."""
    found = placement._source._staging
    if found:
        with found._changed:  # between the end of a fill and the next one nothing is looked at
            ended = found._changed.wait_for(lambda: not any(w.fill and w.fill.left for w in found._windows), 20)
        assert ended, "the reader does not come to an end"


class Captured(Exception):
    pass


@functools.cache
def model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny real model and the arguments of one call of it, on the CPU."""
    torch.manual_seed(0)
    ids = {"input_ids": torch.arange(1, 9)[None]}
    if name == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 6, "num_heads": 4}
        return T5EncoderModel(T5Config(vocab_size=50, **sizes)).eval().requires_grad_(False), ids
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    if name == "clip":
        return CLIPTextModel(CLIPTextConfig(vocab_size=50, **sizes)).eval().requires_grad_(False), ids
    if name == "llama":
        return LlamaModel(LlamaConfig(vocab_size=50, **sizes)).eval().requires_grad_(False), {**ids, "use_cache": False}
    family = tiny.FAMILIES[name]
    pipe = family.build()
    pipe.set_progress_bar_config(disable=True)
    seen: dict[str, Any] = {}
    forward = pipe.transformer.forward

    def captured(*args: Any, **kwargs: Any) -> Any:
        seen.update(inspect.signature(forward).bind(*args, **kwargs).arguments)
        raise Captured

    if family.prepare is not None:
        family.prepare(pipe)
    pipe.transformer.forward = captured
    with pytest.raises(Captured):
        pipe(
            prompt="a red boat",
            num_inference_steps=2,
            width=family.size[0],
            height=family.size[1],
            **family.call_kwargs,
        )
    pipe.transformer.forward = forward
    return pipe.transformer, seen


def on_device(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(on_device(item) for item in value)
    return value.to(SIM) if isinstance(value, torch.Tensor) else value


def output(module: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    return run(module, **{key: on_device(value) for key, value in arguments.items()})[0].cpu()


def weight_pages() -> dict[int, int]:
    """Return the bytes of each buffer in RAM that holds weights or a window, by its address.

    The chunks of reader threads are left out: there are some only where the page cache has lost a file.
    """
    chunk = direct.chunk_bytes(0)
    return {address: pages.nbytes for address, pages in hostbuffer._pages.items() if pages.nbytes != chunk}
