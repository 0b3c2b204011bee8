"""Run a VAE in float32, in the first way that fits: whole, in exact stripes, in blended tiles, on the CPU.

`torch.autocast(dtype=torch.float32)` does nothing, so the weights themselves are float32 (the VAE's unit is read so)
and so are the latents.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ...memory import striped
from ...memory.errors import DoesNotFitError, is_out_of_memory, release_frames
from ...memory.host import management as host
from ...memory.host.flags import host_flags
from ...memory.memory_manager import MemoryManager
from ...memory.planning import learned
from ...memory.planning.fit import sizes_of
from ...memory.planning.forecast import Forecast, Operations, UnitForecast
from ...memory.planning.measured import Overhead
from ...memory.probe import card_of, rates
from ...memory.rates import ASSUMED, Rates
from ...memory.sizes import format_bytes
from ...memory.striped import StripedForecast
from ...memory.weights.unit import ManagedModel
from ..encoding.conditioning import to_host
from ..sampling.latents import GENERATOR, generator_in
from .policy import SHARES, Way, WayName, choose, less
from .precision import full_float32
from .tiling import can_stripe, can_tile, set_tiling

log = logging.getLogger("ballast")

_STEPS = 32  # of budgets of stripes between one power of two and the next
_HOPELESS = 2  # times the room: stripes that take so much do not fit in it however low they are
_LEAST_STRIPES = Way("stripes", share=SHARES[-1])
_FRAMES_FIRST = ("AutoencoderKLAllegro",)  # decode to [B,F,3,H,W]
CPU_SHARE = 1 / 8  # of spare RAM, for the activations of stripes on the CPU; the feature maps get the rest


# `call(module, tensor, device, way)`: what is run, of a tensor on the CPU or the device, or one in stripes.
Call = Callable[[torch.nn.Module, torch.Tensor, torch.device, WayName], torch.Tensor]


class WayForecasts(Protocol):
    """Forecasts of each way for a tensor, made when asked for; None where no dry run is possible."""

    def whole(self, tensor: torch.Tensor) -> Forecast | None: ...

    def stripes(
        self, tensor: torch.Tensor, budget_bytes: int, operations_per_byte: float = ASSUMED.operations_per_byte
    ) -> StripedForecast | None: ...

    def tiles(self, tensor: torch.Tensor) -> Forecast | None: ...


@dataclass
class VaeRun:
    """Runs a VAE on pictures or latents, [B,...] on the CPU, in a way for which the driver counts `room_bytes` at most.

    Without `forecasts` it runs whole. `stage` holds arguments of `MemoryManager.stage`: `alone`, `vram`, `ram`. With
    `splits` a batch may run one by one. A plan may be for a machine of so many `machine_bytes` of RAM, more than
    are free here; one for another card does not go by what this one `recalls` of earlier runs.
    """

    name: str
    manager: MemoryManager
    vae: ManagedModel
    call: Call
    stage: dict[str, Any]
    room_bytes: int
    forecasts: WayForecasts | None = None
    splits: bool = True
    machine_bytes: int = 0
    recalls: bool = True

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Decode a batch to float32 on the CPU. Finished results are kept when memory runs out.

        Raises RuntimeError where stripes fail for another reason, and nothing else that gives the same fits.
        """
        way, first = self.start(tensor)
        done = []
        for part in tensor.split(len(first)):
            made, way = self._of_batch(part, way)
            done += made
        return done[0] if len(done) == 1 else torch.cat(done)

    def _of_batch(self, tensor: torch.Tensor, way: Way) -> tuple[list[torch.Tensor], Way]:
        """Decode a part, or one by one if that runs out of memory. Return the results and the way that worked."""
        if self.splits and len(tensor) > 1 and way.name == "whole":
            try:
                return [self._run(tensor, way)], way
            except Exception as error:
                release_frames(error)
                if host.is_interrupt(error) or not (is_out_of_memory(error) or isinstance(error, DoesNotFitError)):
                    raise
                log.warning("Ballast: %s %d at once ran out of memory; trying one by one", self.name, len(tensor))
                self.manager.make_device_room()
        done = []
        for part in tensor.split(1 if self.splits else len(tensor)):
            made, way = self._step_down(part, way)
            done.append(made)
        return done, way

    def start(self, tensor: torch.Tensor, speed: Rates | None = None) -> tuple[Way, torch.Tensor]:
        """Return the way to try first, and the part of a batch that it is for: all of it, or its first."""
        way = self._choose(tensor, speed)
        if self.splits and len(tensor) > 1 and way.name != "whole":
            return self._choose(tensor[:1], speed), tensor[:1]
        return way, tensor

    def _choose(self, tensor: torch.Tensor, speed: Rates | None) -> Way:
        if host_flags().vae_on_cpu:
            return Way("cpu")
        if self.forecasts is None:
            return Way("whole")
        return choose(self._ways(self.forecasts, tensor, speed), self.room_bytes, self._ram_room())

    def _ways(self, forecasts: WayForecasts, tensor: torch.Tensor, speed: Rates | None) -> Iterator[Way]:
        """Yield the ways with their needs. A way has its dry run only when it is asked for."""
        weights = self.vae.size_bytes
        whole = forecasts.whole(tensor)
        yield Way("whole") if whole is None else self._way("whole", whole.units[self.vae.name])
        if weights < self._tensor_room:
            speed = speed or rates(self.manager.device)
            if can_stripe(self.vae.module) and (stripes := self._stripes(forecasts, tensor, speed)):
                yield stripes
            if can_tile(self.vae.module) and (tiles := forecasts.tiles(tensor)) is not None:
                work = tiles.units[self.vae.name]
                yield replace(self._way("tiles", work), seconds=work.operations.seconds(speed, "F32"))
        yield Way("cpu")

    def _way(self, name: WayName, work: UnitForecast) -> Way:
        """Return a way with the device bytes that its work takes."""
        overhead = self.overhead(work)
        peak = self.vae.size_bytes + overhead.on(work).peak_bytes
        return Way(name, peak, beside_bytes=overhead.driver_bytes(peak) - peak)

    def overhead(self, work: UnitForecast) -> Overhead:
        """Return the memory that a run of this work takes beyond its forecast."""
        if self.manager.accelerator.is_cpu or not self.recalls:
            return Overhead()
        found = learned.recall_overhead(card_of(self.manager.device), sizes_of(self.vae), work)
        return found.over(learned.least_overhead(self.manager.accelerator))

    @property
    def _tensor_room(self) -> int:
        """The most in tensors while it runs in stripes, less what their kernels take."""
        overhead = self.overhead(in_stripes(0))
        return overhead.tensors_within(self.room_bytes) - overhead.workspace_bytes

    def _stripes(self, forecasts: WayForecasts, tensor: torch.Tensor, speed: Rates) -> Way | None:
        """Stripes cut for the largest share of the room whose forecast fits in all of it; None without a forecast."""
        way = None
        for share in SHARES:
            budget = self._striped_bytes(share)
            if (found := forecasts.stripes(tensor, budget, pace(speed))) is None:
                return None
            way = replace(
                self._way("stripes", in_stripes(found.peak_bytes)),
                ram_bytes=found.host_peak_bytes,
                seconds=found.seconds(speed),
                share=share,
            )
            room = self._tensor_room - self.vae.size_bytes
            if found.peak_bytes <= room or found.peak_bytes > _HOPELESS * room:
                break
        return way

    def _striped_bytes(self, share: float) -> int:
        """Return the budget of stripes, rounded down so that one forecast serves many runs."""
        budget = max(0, int(share * (self._tensor_room - self.vae.size_bytes)))
        return budget - budget % max(1, 2 ** (budget.bit_length() - 1) // _STEPS) if budget else 0

    def _ram_room(self) -> int:
        """RAM for feature maps: all that can be freed beside the weights."""
        return max(0, max(self.manager.ram_room(), self.machine_bytes) - self.vae.size_bytes)

    def _ram_bytes(self, tensor: torch.Tensor, way: Way) -> int:
        """RAM that a way needs beside the weights, or 0 where no forecast knows."""
        if way.name == "cpu" and self.forecasts and (whole := self.forecasts.whole(tensor)):
            return whole.units[self.vae.name].peak_bytes
        if way.name == "stripes" and not way.ram_bytes and self.forecasts:  # stepped down to
            speed = pace(rates(self.manager.device))
            found = self.forecasts.stripes(tensor, self._striped_bytes(way.share), speed)
            return found.host_peak_bytes if found else 0
        return way.ram_bytes

    def _step_down(self, tensor: torch.Tensor, way: Way) -> tuple[torch.Tensor, Way]:
        while True:
            try:
                return self._run(tensor, way), way
            except BaseException as error:
                release_frames(error)
                if host.is_interrupt(error) or not isinstance(error, Exception):
                    raise
                short = is_out_of_memory(error) or isinstance(error, DoesNotFitError | striped.OutOfRamError)
                if short:
                    lower = less(_LEAST_STRIPES if isinstance(error, striped.OutOfRamError) else way)
                else:
                    lower = self._without_stripes(tensor, error) if way.name == "stripes" else None
                while lower and not self._can(lower):
                    lower = less(lower)
                if lower is None:
                    raise
                self.manager.make_device_room()
                if short:
                    log.warning("Ballast: %s %s ran out of memory; trying %s", self.name, way.words, lower.words)
                else:
                    log.warning("Ballast: %s %s failed (%s); trying %s", self.name, way.words, error, lower.words)
                way = lower

    def _can(self, way: Way) -> bool:
        able = {"stripes": can_stripe, "tiles": can_tile}.get(way.name)
        return able is None or able(self.vae.module)

    def _without_stripes(self, tensor: torch.Tensor, error: Exception) -> Way:
        """Return the way that is equal to the failed stripes: whole on the CPU, since the device has no room.

        Not every module's code can run in stripes. Raises RuntimeError where RAM is short of that: tiles give another
        picture, which is not to be had by an error.
        """
        wanted, room = self._ram_bytes(tensor, Way("cpu")), self._ram_room()
        if wanted > room:
            raise RuntimeError(
                f"{self.name} in stripes failed ({error}), whole it does not fit the budget of "
                f"{format_bytes(self.room_bytes)}, and on the CPU it takes {format_bytes(wanted)} of RAM, of which "
                f"{format_bytes(room)} can be had. Raise the vram budget, or choose a smaller size or fewer frames."
            ) from error
        return Way("cpu")

    def _run(self, tensor: torch.Tensor, way: Way) -> torch.Tensor:
        manager, budget = self.manager, self._striped_bytes(way.share)
        forecast = None
        if self.forecasts is not None and way.name in ("whole", "tiles"):
            forecast = (self.forecasts.whole if way.name == "whole" else self.forecasts.tiles)(tensor)
        elif way.name == "stripes":
            beside = self.vae.size_bytes + self.overhead(in_stripes(0)).workspace_bytes
            peak = (way.peak_bytes or 0) - beside
            takes = in_stripes(max(budget, peak), peak if way.peak_bytes else budget)
            forecast = Forecast(0, {self.vae.name: takes})
        ram = self._ram_bytes(tensor, way)
        # Stripes read weights later than the modules are called, and tiles are forecast with all of them in place.
        strategies: dict[WayName, str] = {"cpu": "cpu", "whole": "auto"}
        strategy = strategies.get(way.name, "resident")
        work = (self.name, tuple(tensor.shape), way.name)
        with (
            manager.stage(self.name, [self.vae], work=work, forecast=forecast, **self.stage),
            manager.use(self.vae, strategy, alone=self.stage["alone"]) as module,
        ):
            manager.timeline.note(way.note)
            device = manager.execution_device(strategy)
            run = functools.partial(_call, self.call, module, device, way.name)
            room = manager.make_ram_room(ram)
            with full_float32():
                if way.name == "stripes":
                    made = _in_stripes(run, tensor, device, budget, room, pace(rates(manager.device)))
                elif way.name == "cpu" and ram > room and can_stripe(module):
                    made = _sparingly(run, tensor, room)
                else:
                    made = run(tensor)
                return to_host(made.float())


def in_stripes(room_bytes: int, peak_bytes: int | None = None) -> UnitForecast:
    """Return the work of a VAE in stripes of `room_bytes` beside its weights, as learned facts are keyed by it.

    Of these its dry run takes `peak_bytes`, by default all.
    """
    return UnitForecast(0, room_bytes, room_bytes if peak_bytes is None else peak_bytes, 1, Operations())


def _sparingly(run: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, ram_bytes: int) -> torch.Tensor:
    """Run on the CPU in stripes, which need less RAM than whole; run whole if the stripes fail."""
    try:
        return _in_stripes(run, tensor, torch.device("cpu"), int(CPU_SHARE * ram_bytes), ram_bytes)
    except Exception as error:
        if host.is_interrupt(error):
            raise
        log.warning("Ballast: on the CPU in stripes failed (%s); trying whole", str(error))
        release_frames(error)
    return run(tensor)


def _in_stripes(
    run: Callable[[torch.Tensor], torch.Tensor],
    tensor: torch.Tensor,
    device: torch.device,
    budget_bytes: int,
    ram_bytes: int,
    operations_per_byte: float = ASSUMED.operations_per_byte,
) -> torch.Tensor:
    return striped.run(
        run,
        tensor.float(),
        device=device,
        budget_bytes=budget_bytes,
        ram_bytes=ram_bytes,
        on_stripe=host.throw_if_interrupted,
        operations_per_byte=operations_per_byte,
    )


def pace(speed: Rates) -> float:
    """`operations_per_byte`, to two digits: for one forecast to serve runs between which it was measured anew."""
    return float(f"{speed.operations_per_byte:.2g}")


def _call(
    call: Call,
    module: torch.nn.Module,
    device: torch.device,
    way: WayName,
    tensor: torch.Tensor,
) -> torch.Tensor:
    set_tiling(module, way == "tiles")
    try:
        return call(module, tensor, device, way)
    finally:
        set_tiling(module, False)


def run_decoder(
    module: torch.nn.Module, latents: torch.Tensor, device: torch.device, arguments: Mapping[str, Any]
) -> torch.Tensor:
    """Decode latents to pixels, by a VAE whose weights are on the device.

    A generator may be given by its state: each try to decode then draws the same noise.
    """
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    if isinstance(state := arguments.get(GENERATOR), torch.Tensor):
        moved[GENERATOR] = generator_in(state)
    decode: Callable[..., Any] = module.decode  # type: ignore[assignment]
    pixels = decode(latents.to(device, torch.float32), **moved, return_dict=False)[0]
    return pixels.transpose(1, 2) if type(module).__name__ in _FRAMES_FIRST else pixels


def run_encoder(module: torch.nn.Module, pixels: torch.Tensor, device: torch.device, way: WayName) -> torch.Tensor:
    """Encode pixels in -1..1 to latents: the mean of the posterior, so that equal pictures give equal latents."""
    encode: Callable[..., Any] = module.encode  # type: ignore[assignment]
    found = encode(pixels.to(device, torch.float32))
    found = getattr(found, "latent_dist", found)
    return found.mode() if hasattr(found, "mode") else found.latent  # which some make without a distribution


def to_images(pixels: torch.Tensor, *, video: bool) -> torch.Tensor:
    """[B,3,H,W] or [B,3,F,H,W] in -1..1 -> [B,H,W,3], or [B,F,H,W,3] for a video, in 0..1."""
    images = (pixels / 2 + 0.5).clamp(0, 1)
    if images.ndim == 5:
        return images.permute(0, 2, 3, 4, 1).contiguous() if video else images[:, :, 0].permute(0, 2, 3, 1).contiguous()
    return images.permute(0, 2, 3, 1).contiguous()
