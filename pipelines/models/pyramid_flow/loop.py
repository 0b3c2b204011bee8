"""The loop that makes videos frame by frame: each latent frame in three sizes, with the frames before it in view.

Frames are latent ones, of 8 frames of video each except the first, and a frame and a unit are the same. The formulas
are those of pyramid_dit/ in jy0205/Pyramid-Flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ...encoding.conditioning import Text
from ...sampling.latents import StepCheck
from ...sampling.picture_sizes import PictureSizes, Sides

STAGES = 3
_SPATIAL, _TEMPORAL, _SIDE = 8, 8, 64  # pixels and frames of a latent one; pixels that a size is a multiple of

Velocity = Callable[[list[torch.Tensor], float, float], torch.Tensor]  # of clips, timestep and guidance scale
Draw = Callable[[tuple[int, ...]], torch.Tensor]  # block noise of this shape


def check_size(
    width: int, height: int, frames: int, most: Sides | None = None, title: str = "Pyramid-Flow"
) -> tuple[int, int, int]:
    """Frames, height and width of the latents of a video. ValueError for one that cannot be made."""
    PictureSizes(_SIDE, most).check(title, width, height)
    if frames < 1 or (frames - 1) % _TEMPORAL:
        near = max(0, round((frames - 1) / _TEMPORAL)) * _TEMPORAL + 1
        raise ValueError(f"frames is {frames}; {title} takes 1 more than a multiple of {_TEMPORAL}, such as {near}.")
    return 1 + (frames - 1) // _TEMPORAL, height // _SPATIAL, width // _SPATIAL


@dataclass(frozen=True)
class Settings:
    """Steps of each stage and guidance, of the first frame and of those after it.

    With `use_linear_guidance` frame t has a scale of `guidance_scale` - `alpha` * t, at least `min_guidance_scale`.
    """

    num_inference_steps: Sequence[int] = (20, 20, 20)
    video_num_inference_steps: Sequence[int] = (10, 10, 10)
    guidance_scale: float = 7.0
    video_guidance_scale: float = 5.0
    use_linear_guidance: bool = False
    alpha: float = 0.5
    min_guidance_scale: float = 2.0

    def __post_init__(self) -> None:
        for key in ("num_inference_steps", "video_num_inference_steps"):
            steps = getattr(self, key)
            if len(steps) != STAGES or min(steps) < 1:
                raise ValueError(
                    f"{key} is {list(steps)}; it takes {STAGES} numbers of at least 1, one for each stage."
                )

    def steps(self, unit: int) -> Sequence[int]:
        """Return how many steps each stage of a frame has."""
        return self.video_num_inference_steps if unit else self.num_inference_steps

    def scale(self, unit: int) -> float:
        """Return the guidance scale of a frame. 0 is none: one pass of the transformer instead of two."""
        if self.use_linear_guidance:
            return max(self.guidance_scale - self.alpha * unit, self.min_guidance_scale)
        return self.video_guidance_scale if unit else self.guidance_scale

    def calls(self, units: int, given: int = 0) -> int:
        """Return how many steps a video of so many frames takes, of which the first ones are given."""
        return sum(sum(self.steps(unit)) for unit in range(given, units))


@dataclass(frozen=True)
class Step:
    """The progress of a run: a step of a stage of a frame, counted from 0, and the steps of all, counted from 1.

    `expected` is what the frame will become, [B,16,1,h,w] in the stage's size, float32 on the device.
    """

    unit: int
    units: int
    stage: int
    step: int
    taken: int
    total: int
    expected: torch.Tensor


class GuidedVelocity:
    """The transformer with its text, as the loop calls it."""

    def __init__(self, transformer: nn.Module, positive: Text, negative: Text) -> None:
        self.transformer, self.positive = transformer, positive
        self.both = tuple(torch.cat(pair) for pair in zip(negative, positive, strict=True))

    def __call__(self, clips: list[torch.Tensor], timestep: float, scale: float) -> torch.Tensor:
        """Predict the velocity of the last of these clips [B,16,t,h,w], oldest first, on the transformer's device."""
        guided = scale > 0
        sample = [torch.cat([clip, clip]) for clip in clips] if guided else clips
        last = sample[-1]
        # Rounded to the latents' dtype, as in training: 971.584 is 972 in bfloat16.
        at = torch.full((len(last),), timestep, dtype=last.dtype, device=last.device)
        text = self.both if guided else self.positive
        found: torch.Tensor = self.transformer(sample, at, *text, return_dict=False)[0]
        if not guided:
            return found
        unconditional, conditional = found.chunk(2)
        return unconditional + scale * (conditional - unconditional)


class History:
    """The frames that are done, on the CPU, each in the size of every stage."""

    def __init__(self) -> None:
        self._frames: list[list[torch.Tensor]] = []  # by age, then by stage

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, frame: torch.Tensor) -> None:
        """One more frame, [B,16,1,h,w] in full size."""
        sizes = [frame.cpu()]
        for _ in range(STAGES - 1):
            sizes.insert(0, halve(sizes[0]))
        self._frames.append(sizes)

    def clips(self, stage: int) -> list[torch.Tensor]:
        """Return the clips that a stage sees: the newest frame in its size, each older one half as large as the next.

        The oldest clip comes first. It holds all frames that are as small as it goes.
        """
        sizes = list(range(stage, 0, -1)) or [0]
        clips = [frame[size] for frame, size in zip(reversed(self._frames), sizes, strict=False)]
        if rest := self._frames[: -len(sizes)]:
            clips.append(torch.cat([frame[0] for frame in rest], dim=2))
        return clips[::-1]

    def latents(self) -> torch.Tensor:
        """All frames in full size, [B,16,T,h,w]."""
        return torch.cat([frame[-1] for frame in self._frames], dim=2)


class SeededNoise:
    """Draws float32 noise on the CPU: each sample of a batch from a seed of its own."""

    def __init__(self, seeds: Sequence[int], gamma: float = 1 / 3) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.gamma = gamma

    def initial(self, *shape: int) -> torch.Tensor:
        """Return what a run starts from, [B,16,T,h,w] in full size; `shape` is without the batch."""
        return torch.stack([torch.randn(shape, generator=generator) for generator in self.generators])

    def __call__(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([block_noise(shape[1:], self.gamma, generator) for generator in self.generators])


def block_noise(shape: Sequence[int], gamma: float, generator: torch.Generator | None = None) -> torch.Tensor:
    """Noise [...,h,w] in which each 2 x 2 block has the covariance (1 + gamma) I - gamma 11^T, gamma up to 1/3.

    That is white noise with the mean of each block made smaller: at 1/3 it is gone.
    """
    *front, height, width = shape
    blocks = torch.randn(*front, height // 2, 2, width // 2, 2, generator=generator)
    mean = blocks.mean((-3, -1), keepdim=True)
    noise = math.sqrt(1 + gamma) * (blocks - mean) + math.sqrt(max(0.0, 1 - 3 * gamma)) * mean
    return noise.reshape(shape)


def halve(x: torch.Tensor) -> torch.Tensor:
    """Latents [B,16,T,h,w] in half the size."""
    half = F.interpolate(x.flatten(0, 1).float(), scale_factor=0.5, mode="bilinear")
    return half.unflatten(0, x.shape[:2]).to(x.dtype)


@torch.no_grad()
def generate(
    velocity: Velocity,
    noise: torch.Tensor,
    draw: Draw,
    settings: Settings,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    first: torch.Tensor | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> torch.Tensor:
    """Latents [B,16,T,h,w] as the transformer knows them, of this dtype, on the CPU.

    `noise` [B,16,T,h,w] is white; `draw` gives block noise for each later stage. `first` [B,16,1,h,w] is the first
    frame, for a video that starts with a picture; the last of the noise is then left over. Only the frame at work and
    what it sees are on the device. `on_step` is called after each step; what it raises ends the run.
    """
    from .scheduler import PyramidFlowMatchEulerDiscreteScheduler

    scheduler = PyramidFlowMatchEulerDiscreteScheduler()
    history = History()
    for frame in () if first is None else first.to(dtype).split(1, dim=2):
        history.add(frame)
    units, given = noise.shape[2], len(history)
    for _ in range(STAGES - 1):
        noise = 2 * halve(noise)  # again white
    taken, total = 0, settings.calls(units, given)
    finite = StepCheck()
    for unit in range(given, units):
        x = noise[:, :, unit - given, None].to(device, dtype)
        for stage, steps in enumerate(settings.steps(unit)):
            scheduler.set_timesteps(steps, stage)
            if stage:
                x = _enlarge(x, draw, *scheduler.renoise(stage))
            seen = [clip.to(device) for clip in history.clips(stage)]
            for step, timestep in enumerate(scheduler.timesteps):
                direction = velocity([*seen, x], timestep, settings.scale(unit))
                expected = scheduler.expected(direction, x)
                x = scheduler.step(direction, x)
                taken += 1
                finite.check(x, taken, total)
                if on_step is not None:
                    on_step(Step(unit, units, stage, step, taken, total, expected))
        history.add(x)
    return history.latents()


def _enlarge(x: torch.Tensor, draw: Draw, alpha: float, beta: float) -> torch.Tensor:
    """Return a sample twice as large, with the noise that its next stage starts with."""
    large = x.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
    noise = draw(tuple(large.shape)).to(x.device)
    return (alpha * large.float() + beta * noise).to(x.dtype)
