"""Models of full size by diffusers' own calls on the clock of a simulated card, where no weight has values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from ballast.bench.downloads import full_size
from ballast.memory.planning.dry_run import lay_weights
from ballast.memory.rates import Rates
from ballast.memory.simulated.clock import Event, Stream, current_stream
from ballast.memory.simulated.dry import DEVICE, dry_card
from torch import nn

from .pictures import picture, pil

SIDE, WORDS = 1024, 512


def klein_step_seconds(references: int, rates: Rates, streamed: bool = False) -> float:
    """Seconds of a step of one picture of a megapixel with as many references of that size.

    All weights are there or, `streamed`, come to the card block by block, each while the one before computes.
    """
    parts = full_size.EDIT_PARTS["flux2_klein"]
    transformer = full_size.empty(diffusers.Flux2Transformer2DModel, parts["transformer"]).to(torch.bfloat16)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in _blocks(transformer)]
    return step_seconds(
        diffusers.Flux2KleinPipeline,
        {
            "scheduler": full_size.SCHEDULERS["flux2_klein"](),
            "vae": full_size.empty(diffusers.AutoencoderKLFlux2, parts["vae"]),
            "transformer": transformer,
        },
        rates,
        {
            "image": [pil(picture(SIDE, SIDE))] * references or None,
            "prompt_embeds": torch.zeros(1, WORDS, 7680, dtype=torch.bfloat16),
            "width": SIDE,
            "height": SIDE,
            "guidance_scale": 1.0,
        },
        lambda: _stream(_blocks(transformer), sizes) if streamed else None,
    )


def step_seconds(
    stock: type, parts: dict[str, Any], rates: Rates, given: dict[str, Any], prepare: Callable[[], None] | None = None
) -> float:
    """Seconds of a step of a pipeline of diffusers that has some `parts`, all on the card, and is `given` arguments.

    `prepare` is called on the card before the run.
    """
    ends: list[float] = []
    with torch.inference_mode(), dry_card() as card:
        copies = rates.pinned_bytes_per_second
        card.configure(None, 0, copies, copies, rates.operations_per_second)
        for part in parts.values():
            if isinstance(part, nn.Module):
                lay_weights(part, card)
        if prepare:
            prepare()
        there = property(lambda self: DEVICE)
        cls: Any = type(stock.__name__, (stock,), {"__module__": stock.__module__, "_execution_device": there})
        lacking = {name: None for name in stock._get_signature_keys(stock)[0] if name not in parts}  # type: ignore[attr-defined]
        pipe = cls(**lacking, **parts)
        pipe.set_progress_bar_config(disable=True)
        pipe(
            **{name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in given.items()},
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            callback_on_step_end=lambda *_: ends.append(card.stats().clock_seconds) or {},
            callback_on_step_end_tensor_inputs=[],
        )
    return ends[2] - ends[1]


def _blocks(transformer: Any) -> list[nn.Module]:
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def _stream(blocks: list[nn.Module], sizes: list[int]) -> None:
    """Copy each block's bytes on a stream of its own: two are there at once, the one that computes and the next."""
    copying, arrived, done = Stream(), dict[int, Event](), dict[int, Event]()

    def fetch(i: int) -> None:
        if (before := done.get((i - 2) % len(blocks))) is not None:
            copying.wait_event(before)
        with copying:
            target = torch.empty(sizes[i], dtype=torch.uint8, device=DEVICE)
            target.copy_(torch.empty(sizes[i], dtype=torch.uint8), non_blocking=True)
            arrived[i] = copying.record_event()

    def enter(i: int) -> None:
        if i not in arrived:
            fetch(i)
        fetch((i + 1) % len(blocks))
        current_stream().wait_event(arrived.pop(i))

    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, i=i: enter(i))
        block.register_forward_hook(lambda *_, i=i: done.__setitem__(i, current_stream().record_event()))
