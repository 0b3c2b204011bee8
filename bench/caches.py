"""Step caches on the demo: pictures against those without a cache, and the loop's seconds on the simulated clock."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..memory import simulated
from ..pipelines.opening import open_pipeline
from ..pipelines.sampling.step_cache import DEFAULTS
from .harness import Run
from .places import DEMO

KINDS = ("static:2", "static:3", "easycache", "firstblock")  # those that the demo's class takes
PROMPTS = (
    "a red circle on a blue background, left",
    "a green square on a yellow background",
    "a blue triangle on a white background, right",
    "a yellow circle on a black background",
)
STEPS = 20
LEAST_PSNR = 30.0  # dB: below it most people see the difference at once


def measure(to: Run) -> None:
    """Draw the prompts without a cache and with each kind."""
    simulated.enable(total="1GB", h2d_gbps=1.0, tflops=0.01)
    pipe, steps = open_pipeline(DEMO, device="sim"), to.request.get("steps", STEPS)
    prompts = PROMPTS[: to.request.get("prompts", len(PROMPTS))]
    plain = [_drawn(pipe, prompt, steps, "off") for prompt in prompts]
    for kind in to.request.get("kinds", KINDS):
        drawn = [_drawn(pipe, prompt, steps, kind) for prompt in prompts]
        ratios = [whole / cached for (_, whole), (_, cached) in zip(plain, drawn, strict=True)]
        psnr = [_psnr(ours, theirs) for (ours, _), (theirs, _) in zip(drawn, plain, strict=True)]
        name = kind if ":" in kind else f"{kind}:{DEFAULTS[kind]:g}"
        row = {"name": name, "times_as_fast": min(ratios), "most": max(ratios), "psnr": min(psnr), "best": max(psnr)}
        to.row(**row, verdict="ok" if min(psnr) >= LEAST_PSNR and max(ratios) > 1.05 else "TOO LITTLE")


def _drawn(pipe: Any, prompt: str, steps: int, kind: str) -> tuple[torch.Tensor, float]:
    """Return a picture, and the seconds of its loop."""
    cond = pipe.encode(prompt)
    simulated.reset_stats()
    latents = pipe.sample(cond, steps=steps, cache=kind)
    seconds = simulated.stats().clock_seconds
    return pipe.decode(latents), seconds


def _psnr(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of two pictures in 0..1, in dB; 99 for equal ones."""
    error = float((ours - theirs).square().mean())
    return min(99.0, -10 * math.log10(error)) if error else 99.0
