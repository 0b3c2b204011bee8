"""Flow matching in stages of growing size: each runs its own stretch of the way from noise to picture.

Stage 0, the smallest, starts from noise; each later one starts from where the one before ended, made twice as large and
with fresh noise. The formulas are those of diffusion_schedulers/ in jy0205/Pyramid-Flow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin


class PyramidFlowMatchEulerDiscreteScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """Euler steps through one stage at a time.

    Sigma is the share of noise: 1 for noise, 0 for the picture. Stage s starts with `start_sigmas[s]` of it, ends with
    `end_sigmas[s]`, and would start with `ori_start_sigmas[s]` if the enlarged picture needed no fresh noise. Inside a
    stage `sigmas` run from 1, its start, to 0, its end, and `timesteps` are what the transformer is told. All are plain
    numbers, so a stage needs no device.
    """

    order = 1

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        stages: int = 3,
        stage_range: Sequence[float] = (0, 1 / 3, 2 / 3, 1),
        gamma: float = 1 / 3,
    ) -> None:
        train = num_train_timesteps
        # In float32, as the models were trained: its last digits show in the timesteps.
        shares = np.arange(train, 0, -1, dtype=np.float32) / np.float32(train)
        shares = np.float32(shift) * shares / (1 + np.float32(shift - 1) * shares)
        bounds = [min(max(int(part * train), 0), train) for part in stage_range]
        self.ori_start_sigmas = [float(shares[bound]) for bound in bounds[:-1]]
        self.end_sigmas = [float(shares[bound]) if bound < train else 0.0 for bound in bounds[1:]]
        self.start_sigmas = [
            1 - self.renoise(stage)[0] * (1 - sigma) if stage else sigma
            for stage, sigma in enumerate(self.ori_start_sigmas)
        ]
        lengths = [start - end for start, end in zip(self.start_sigmas, self.end_sigmas, strict=True)]
        parts = [sum(lengths[:stage]) / sum(lengths) for stage in range(stages)] + [1.0]
        self.timestep_ratios = list(zip(parts, parts[1:], strict=False))
        times = shares * np.float32(train)
        self._stage_ends = [_ends(times, int(first * train), int(last * train)) for first, last in self.timestep_ratios]
        self.timesteps: list[float] = []
        self.sigmas: list[float] = []
        self._stage = self._taken = 0

    def renoise(self, stage: int) -> tuple[float, float]:
        """Alpha and beta of `alpha * enlarged + beta * block_noise`, with which a stage after the first starts."""
        gamma, noise = self.config["gamma"], self.ori_start_sigmas[stage]
        alpha = 1 / (math.sqrt(1 + 1 / gamma) * noise + (1 - noise))
        return alpha, alpha * noise / math.sqrt(gamma)

    def set_timesteps(self, steps: int, stage: int) -> None:
        """Begin a stage: `timesteps` get so many numbers, `sigmas` one more, the last one 0."""
        train = self.config["num_train_timesteps"]
        self.timesteps = np.linspace(*self._stage_ends[stage], steps).tolist()
        self.sigmas = [*np.linspace(1, 1 - (train - 1) / train, steps).tolist(), 0.0]
        self._stage, self._taken = stage, 0

    def step(self, model_output: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return the sample one step on, of any shape: in float32, returned in the velocity's own dtype."""
        change = self.sigmas[self._taken + 1] - self.sigmas[self._taken]
        self._taken += 1
        return (sample.float() + change * model_output.float()).to(model_output.dtype)

    def expected(self, model_output: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return what the sample is expected to become in the end, without noise, in float32.

        To be asked before `step`.
        """
        start, end = self.start_sigmas[self._stage], self.end_sigmas[self._stage]
        part = self.sigmas[self._taken]
        noise = part * start + (1 - part) * end
        return sample.float() - noise / (start - end) * model_output.float()


def _ends(times: np.ndarray, first: int, last: int) -> tuple[float, float]:
    """Return the first timestep of a stage, and the one just before the next stage begins."""
    begin, end = times[first], times[min(last, len(times) - 1)]
    train = np.float32(len(times))
    return float(begin), float(begin + (train - 1) * ((end - begin) / train))
