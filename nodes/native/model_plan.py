"""What is known before ComfyUI's own MODEL samples: its weights, its activations, and the memory that is free.

ComfyUI decides which weights stay in VRAM, so nothing is said of that but whether all of them can. Nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...memory.accelerator import Accelerator
from ...memory.budget import spare_ram_bytes
from ...memory.charts import drawn
from ...memory.host import management as host
from ...memory.sizes import format_bytes
from ...pipelines.planning.plans import NoBudgetError
from .activations import Expected, dry_run_bytes, expected
from .model_budget import budget_of
from .model_weights import Weights, weights_of

if TYPE_CHECKING:
    from PIL.Image import Image

_SIZE = 1024  # pixels, where nothing says otherwise
_WHOSE = "ComfyUI runs this model and decides which weights stay in VRAM; no seconds are foretold."


@dataclass(frozen=True)
class Work:
    """The work asked of a MODEL: latents of `shape`, batch first, a scale of guidance, and a prompt if it is known."""

    shape: tuple[int, ...]
    guidance: float = 0.0
    prompt: Any = None

    @property
    def call_shape(self) -> tuple[int, ...]:
        """The shape of one call at most: with guidance the host runs both prompts in one batch where that fits."""
        return self.shape if self.guidance == 1 else (2 * self.shape[0], *self.shape[1:])


@dataclass(frozen=True)
class ModelPlan:
    """The facts of sampling with a MODEL, whatever the budget, and the budgets in bytes to hold them against.

    `dry_run_bytes` are activations by a dry run, None where the model's code allows none.
    """

    title: str
    device: torch.device
    weights: Weights
    expected_bytes: int
    dry_run_bytes: int | None
    free_bytes: int
    budgets: tuple[int, ...]

    @property
    def activation_bytes(self) -> int:
        return self.expected_bytes if self.dry_run_bytes is None else self.dry_run_bytes

    def facts(self) -> list[str]:
        """Return a line each for the weights, the activations, and the free memory."""
        theirs = format_bytes(self.expected_bytes)
        told = f"{theirs} as ComfyUI expects; the model's code allows no dry run"
        if self.dry_run_bytes is not None:
            told = f"{format_bytes(self.dry_run_bytes)} by a dry run; ComfyUI expects {theirs}"
        free = f"{format_bytes(self.free_bytes)} on {self.device}, {format_bytes(spare_ram_bytes())} of RAM"
        return [self.weights.describe(), f"Activations: {told}.", f"Free for models: {free}."]

    def verdict(self, budget_bytes: int) -> str:
        """Return one line: whether weights and activations fit a budget."""
        weights_bytes, budget = self.weights.total_bytes, format_bytes(budget_bytes)
        whole = f"{budget}: weights and activations take {format_bytes(weights_bytes + self.activation_bytes, up=True)}"
        over = weights_bytes + self.activation_bytes - budget_bytes
        if self.activation_bytes > budget_bytes:
            return f"{budget}: it does not fit, activations alone take {format_bytes(self.activation_bytes, up=True)}."
        if over > 0:
            return f"{whole}, so at least {format_bytes(over)} of weights pass through in each step."
        if weights_bytes + self.expected_bytes > budget_bytes:
            return f"{whole}, which fits, but ComfyUI expects more and may keep fewer weights there."
        return f"{whole}: all of it fits."

    def verdicts(self) -> list[str]:
        return [self.verdict(budget_bytes) for budget_bytes in self.budgets]

    def __str__(self) -> str:
        return "\n\n".join([self.title, "\n".join(self.facts()), "\n".join(self.verdicts()), _WHOSE])

    def picture(self, width: int, height: int, scale: float) -> Image:
        """Return a chart for each budget, one above the other: weights and activations beside it."""

        def draw() -> Image:
            from ...memory.charts.plan_chart import Part, Plan, draw_plans

            weights_bytes = self.weights.total_bytes
            sizes = {"idle_bytes": 0, "weights_bytes": weights_bytes}
            sizes["peak_bytes"] = weights_bytes + self.activation_bytes
            part = Part("sample", "model", "transformer", "", seconds=1.0, loading=0.0, **sizes)
            plans = [Plan(self.verdict(budget), budget, {"sample": ""}, (part,)) for budget in self.budgets]
            return draw_plans(plans, width, height, scale)

        return drawn(draw, round(width * scale), round(height * len(self.budgets) * scale))


def is_model(thing: Any) -> bool:
    """Return whether it is a diffusion model as the host's loaders make them."""
    return hasattr(getattr(thing, "model", None), "diffusion_model") and hasattr(thing, "patches")


def check_inputs(patcher: Any, prompt: Any, others: Mapping[str, Any]) -> None:
    """Raise ValueError for a `patcher` that is no MODEL, and for inputs that only pipelines of ours take."""
    if not is_model(patcher):
        raise ValueError(f"the input is {type(patcher).__name__}, neither a Ballast pipeline nor a MODEL.")
    if prompt is not None and not isinstance(prompt, list):
        raise ValueError("conditioning is Ballast's, but a MODEL is connected. Use positive of Staged Text Encode.")
    if wrong := ", ".join(others):
        raise ValueError(f"{wrong}: only for Ballast's pipelines, but a MODEL is connected. Leave it as it was.")


def shape_of(
    patcher: Any, latent: Mapping[str, Any] | None, width: int = 0, height: int = 0, frames: int = 0
) -> tuple[int, ...]:
    """Return the shape of latents to sample: of those that are given, or of a size in pixels; 0 for what is usual."""
    form = patcher.model.latent_format
    if latent is not None:
        samples = latent["samples"]
        shape = list(samples.shape) if not getattr(samples, "is_nested", False) else list(samples.unbind()[0].shape)
        shape[1] = form.latent_channels  # which the host gives to empty ones
    else:
        ratio = getattr(form, "spacial_downscale_ratio", 8)
        shape = [1, form.latent_channels, (height or _SIZE) // ratio, (width or _SIZE) // ratio]
    if form.latent_dimensions == 3 and len(shape) == 4:
        shape.insert(2, 1 + max(0, frames - 1) // getattr(form, "temporal_downscale_ratio", 4))
    return tuple(shape)


def plan_model(patcher: Any, work: Work, budgets: Sequence[int | None]) -> ModelPlan:
    """Return the plan. A budget of 0 is all that could be free, None that of VRAM Budget, or else the same.

    Takes a second or two for a large model. Raises NoBudgetError without a GPU and a budget.
    """
    on = torch.device(patcher.load_device)
    card = Accelerator(on)
    free_bytes = max(0, card.free_bytes() + host.movable_bytes(on) - (host.reserve_bytes(on) or 0))
    own = budget_of(patcher) or 0
    given = [own if budget is None else budget for budget in budgets]
    if card.is_cpu and not all(given):
        raise NoBudgetError("8, 12, 24")
    expects: Expected = expected(patcher, work.shape)
    return ModelPlan(
        title=_title(patcher, work.shape),
        device=on,
        weights=weights_of(patcher),
        expected_bytes=expects.with_guidance(work.guidance),
        dry_run_bytes=dry_run_bytes(patcher.model, work.call_shape, work.prompt, card.fuses),
        free_bytes=free_bytes,
        budgets=tuple(budget or free_bytes for budget in given),
    )


def _title(patcher: Any, shape: Sequence[int]) -> str:
    ratio = getattr(patcher.model.latent_format, "spacial_downscale_ratio", 8)
    frames = f"; {shape[2]} latent frames" if len(shape) == 5 and shape[2] > 1 else ""
    batch = f"; batch {shape[0]}" if shape[0] > 1 else ""
    return f"{type(patcher.model).__name__}, {shape[-1] * ratio} x {shape[-2] * ratio}{frames}{batch}"
