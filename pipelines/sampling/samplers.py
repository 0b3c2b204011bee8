"""Samplers of a flow, by the names that ComfyUI has for them, as a scheduler that pipelines of diffusers call.

A solver is a pure function of a `Point` in the run. They agree with ComfyUI's in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor

from .schedules import shifted

_KEPT = 3  # denoised samples of the last steps, as many as a solver reads
_NEARLY_ALL = 1 - 1e-4  # unshifted noise level to begin at, where the logarithm of 1's ratio is infinite
_POINTS = 200  # of the numerical integral of er_sde


@dataclass(frozen=True)
class Point:
    """A step of a run: the noisy sample `x`, and `denoised`, the clean one that the model expects, the last one first.

    `sigmas` are the noise levels of all steps, `at` is the step, and `noise()` draws.
    """

    x: torch.Tensor
    denoised: tuple[torch.Tensor, ...]
    sigmas: torch.Tensor
    at: int
    noise: Callable[[], torch.Tensor]

    @property
    def sigma(self) -> torch.Tensor:
        """The noise level of the sample."""
        return self.sigmas[self.at]

    @property
    def next(self) -> torch.Tensor:
        """The noise level after the step."""
        return self.sigmas[self.at + 1]

    @property
    def last(self) -> bool:
        """Return whether no noise is left after the step."""
        return bool(self.next == 0)


def euler(point: Point) -> torch.Tensor:
    """Step along the line to the denoised sample."""
    return point.x + _slope(point) * (point.next - point.sigma)


def euler_ancestral(point: Point) -> torch.Tensor:
    """Step below the next noise level, and add noise up to it, as rectified flow mixes them."""
    if point.last:
        return point.denoised[0]
    down = point.next * (1 + (point.next / point.sigma - 1))
    kept = (1 - point.next) / (1 - down)
    renoise = (point.next**2 - down**2 * (1 - point.next) ** 2 / (1 - down) ** 2) ** 0.5
    ratio = down / point.sigma
    x = ratio * point.x + (1 - ratio) * point.denoised[0]
    return kept * x + point.noise() * renoise


def dpmpp_2m(point: Point) -> torch.Tensor:
    """Step by DPM-Solver++(2M), over the logarithm of sigma."""
    time, after = point.sigma.log().neg(), point.next.log().neg()
    step, denoised = after - time, point.denoised[0]
    if len(point.denoised) > 1 and not point.last:
        ratio = (time - point.sigmas[point.at - 1].log().neg()) / step
        denoised = (1 + 1 / (2 * ratio)) * denoised - (1 / (2 * ratio)) * point.denoised[1]
    return (after.neg().exp() / time.neg().exp()) * point.x - (-step).expm1() * denoised


def dpmpp_2m_sde(point: Point) -> torch.Tensor:
    """Step by the stochastic DPM-Solver++(2M), its midpoint form."""
    if point.last:
        return point.denoised[0]
    before, after = _log_snr(point.sigma), _log_snr(point.next)
    step = after - before
    alpha, gained = point.next * after.exp(), (-step * 2.0).expm1().neg()
    x = point.next / point.sigma * (-step).exp() * point.x + alpha * gained * point.denoised[0]
    if len(point.denoised) > 1:
        ratio = (before - _log_snr(point.sigmas[point.at - 1])) / step
        x = x + 0.5 * alpha * gained * (1 / ratio) * (point.denoised[0] - point.denoised[1])
    return x + point.noise() * point.next * (-2 * step).expm1().neg().sqrt()


def res_multistep(point: Point) -> torch.Tensor:
    """Step by the second order exponential integrator of arXiv:2308.02157."""
    if point.last or len(point.denoised) < 2:
        return euler(point)
    time, after, before = (sigma.log().neg() for sigma in (point.sigma, point.next, point.sigmas[point.at - 1]))
    step = after - time
    share = (before - time) / step
    phi = torch.expm1(-step) / -step
    phi_2 = (phi - 1.0) / -step
    now, then = torch.nan_to_num(phi - phi_2 / share), torch.nan_to_num(phi_2 / share)
    return step.neg().exp() * point.x + step * (now * point.denoised[0] + then * point.denoised[1])


def lcm(point: Point) -> torch.Tensor:
    """Take the denoised sample, and add noise up to the next level."""
    if point.last:
        return point.denoised[0]
    return point.next * point.noise() + (1.0 - point.next) * point.denoised[0]


def er_sde(point: Point) -> torch.Tensor:
    """Step by the third order solver of the extended reverse-time SDE, arXiv:2309.06169."""
    if point.last:
        return point.denoised[0]
    ratios = [_noise_ratio(point.sigmas[at]) for at in range(max(0, point.at - 2), point.at + 2)]
    now, after = ratios[-2:]
    alpha = point.next / after
    r = _er_noise(after) / _er_noise(now)
    x = alpha / (point.sigma / now) * r * point.x + alpha * (1 - r) * point.denoised[0]
    if len(point.denoised) > 1:
        span = after - now
        width = -span / _POINTS
        places = after + torch.arange(_POINTS, dtype=torch.float32) * width
        slope = (point.denoised[0] - point.denoised[1]) / (now - ratios[-3])
        x = x + alpha * (span + torch.sum(1 / _er_noise(places)) * width * _er_noise(after)) * slope
        if len(point.denoised) > 2:
            former = (point.denoised[1] - point.denoised[2]) / (ratios[-3] - ratios[-4])
            bend = (slope - former) / ((now - ratios[-4]) / 2)
            weight = torch.sum((places - now) / _er_noise(places)) * width
            x = x + alpha * ((span**2) / 2 + weight * _er_noise(after)) * bend
    return x + alpha * point.noise() * (after**2 - now**2 * r**2).sqrt().nan_to_num(nan=0.0)


SOLVERS: Mapping[str, Callable[[Point], torch.Tensor]] = {
    "euler": euler,
    "euler_ancestral": euler_ancestral,
    "heun": euler,  # which is its first half
    "dpmpp_2m": dpmpp_2m,
    "dpmpp_2m_sde": dpmpp_2m_sde,
    "res_multistep": res_multistep,
    "lcm": lcm,
    "er_sde": er_sde,
}
_LOGARITHMIC = (dpmpp_2m_sde, er_sde)  # begin below 1


_Base: Any = FlowMatchEulerDiscreteScheduler


class FlowSampler(_Base):  # type: ignore[misc]
    """A scheduler that steps by one of the solvers. Its noise levels are those of its base, or those that it is given.

    With `heun` each noise level but the first comes twice, as in FlowMatchHeunDiscreteScheduler: a call of the model
    each.
    """

    solver_name = "euler"

    @property
    def order(self) -> int:
        """The calls of the model in a step."""
        return 2 if self.solver_name == "heun" else 1

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        """Set the noise levels as the base does, then in the order in which the solver takes them."""
        super().set_timesteps(num_inference_steps, None, sigmas, mu, timesteps)
        shift = math.exp(mu) if mu is not None and self.config.use_dynamic_shifting else self.shift
        self.arrange(self.sigmas, None if timesteps is None else self.timesteps, device, shift)

    def arrange(self, sigmas: torch.Tensor, timesteps: torch.Tensor | None, device: Any, shift: float) -> None:
        """Take these noise levels, with a zero at the end, and the times that the model is told for them."""
        if SOLVERS[self.solver_name] in _LOGARITHMIC and sigmas[0] >= 1:
            sigmas = torch.cat([shifted(shift, torch.tensor([_NEARLY_ALL])), sigmas[1:]])
        timesteps = sigmas[:-1] * self.config.num_train_timesteps if timesteps is None else timesteps
        if self.order == 2:
            sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])
            timesteps = torch.cat([timesteps[:1], timesteps[1:].repeat_interleave(2)])
        self.sigmas, self.timesteps = sigmas, timesteps.to(device)
        self._denoised: tuple[torch.Tensor, ...] = ()
        self._half: tuple[torch.Tensor, torch.Tensor] | None = None

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Any,
        sample: torch.Tensor,
        generator: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Return the sample at the next noise level, from the velocity that the model gave."""
        if self._step_index is None:
            self._init_step_index(timestep)
        at, x = self._step_index, sample.to(torch.float32)
        denoised = x - model_output.to(torch.float32) * self.sigmas[at]
        self._denoised = (denoised, *self._denoised)[:_KEPT]

        def noise() -> torch.Tensor:
            return randn_tensor(x.shape, generator=generator, device=x.device, dtype=torch.float32)

        point = Point(x, self._denoised, self.sigmas, at, noise)
        made = self._heun(point) if self.solver_name == "heun" else SOLVERS[self.solver_name](point)
        self._step_index += 1
        made = made.to(model_output.dtype)
        return _Output(made) if return_dict else (made,)

    def _heun(self, point: Point) -> torch.Tensor:
        """Step by a line first, then from its start by the mean of the slopes at both of its ends."""
        if self._half is None:
            if not point.last:
                self._half = point.x, _slope(point)
            return euler(point)
        (start, slope), self._half = self._half, None
        return start + (slope + _slope(point)) / 2 * (point.sigma - point.sigmas[point.at - 1])


@dataclass(frozen=True)
class _Output:
    prev_sample: torch.Tensor


def _slope(point: Point) -> torch.Tensor:
    return (point.x - point.denoised[0]) / point.sigma


def _log_snr(sigma: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of signal to noise, halved."""
    return sigma.logit().neg()


def _noise_ratio(sigma: torch.Tensor) -> torch.Tensor:
    return _log_snr(sigma).neg().exp()


def _er_noise(ratio: torch.Tensor) -> torch.Tensor:
    return ratio * ((ratio**0.3).exp() + 10.0)
