"""Decode with ComfyUI's own VAEs in float32, on a private copy: the VAE that other nodes hold does not change."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...memory import striped
from ...memory.accelerator import Accelerator
from ...memory.budget import spare_ram_bytes
from ...memory.errors import is_out_of_memory, release_frames
from ...memory.host import management as host
from ...memory.sizes import format_bytes
from ...pipelines.decoding.decode import CPU_SHARE
from ...pipelines.decoding.policy import Way
from ...pipelines.decoding.precision import full_float32
from ...pipelines.sampling.latents import check_finite, check_fit, check_latents
from .module_copies import float32_copy, tensors_of

log = logging.getLogger("ballast")

_SHARE = 0.9  # share of the free memory that stripes may take
# Methods of the host's VAE that decode in tiles.
_TILED = ("decode_tiled_", "decode_tiled_1d", "decode_tiled_3d", "_decode_tiled_owned")


class _StripesError(RuntimeError):
    """Stripes failed, and not for memory. Says why."""


@dataclass(frozen=True)
class Decoded:
    """Frames [F,H,W,C] in 0..1, float32 on the CPU, and a summary for the node."""

    images: torch.Tensor
    summary: str


def is_vae(thing: Any) -> bool:
    """Return whether it is a VAE as the host's loaders make them."""
    return all(hasattr(thing, name) for name in ("first_stage_model", "decode", "process_output"))


def decode_native(vae: Any, latents: torch.Tensor) -> Decoded:
    """Decode pictures, or the frames of videos.

    Whole, in exact stripes where that does not fit, in the VAE's own tiles if memory runs out all the same, then on the
    CPU. The summary says which.

    Neither the copy nor the VAE itself is on the device afterwards, whatever happened. Raises WrongLatentsError for
    latents of another model, RuntimeError where stripes fail for another reason and the CPU has no room for the whole.
    """
    try:
        return _decode_native(vae, latents)
    except Exception as error:
        if not host.is_interrupt(error) and not is_out_of_memory(error) and isinstance(latents, torch.Tensor):
            _check_fit(vae, latents, error)
        raise


def _check_fit(vae: Any, latents: torch.Tensor, error: Exception) -> None:
    """Raise WrongLatentsError if the latents that failed are those of another VAE.

    Asked afterwards: some of the host's VAEs take more than they say, and what works is not to be refused.
    """
    takes, dimensions = getattr(vae, "latent_channels", None), getattr(vae, "latent_dim", None)
    if isinstance(takes, int) and isinstance(dimensions, int):
        whose = f"this VAE ({type(vae.first_stage_model).__name__})"
        advice = "Connect the VAE of the model that made them."
        release_frames(error)
        check_fit(latents, whose, takes, dimensions + 2, advice)


def _decode_native(vae: Any, latents: torch.Tensor) -> Decoded:
    if vae.first_stage_model is None:
        raise ValueError("this VAE has no weights: the checkpoint holds none. Load one with Load VAE.")
    check_latents(latents)
    check_finite(latents, "the latents hold")
    started = time.monotonic()
    host.evict([vae.patcher])  # of no use here, and its weights are all in place then
    module = float32_copy(vae.patcher)
    parts = [latents] if _mixes_pictures(module) else latents.split(1)
    done: list[torch.Tensor] = []  # kept when a later one runs out of memory
    ways: dict[str, None] = {}  # of those that are done
    no_stripes = ""  # why
    for device in dict.fromkeys((torch.device(vae.device), torch.device("cpu"))):
        try:
            with full_float32(), _double_on(device, vae, module, no_stripes) as double:
                while len(done) < len(parts):
                    double.ways.clear()
                    done.append(double.decode(parts[len(done)]).float().cpu())
                    ways |= dict.fromkeys(sorted(double.ways))
        except Exception as error:
            failed = isinstance(error, _StripesError)
            if device.type == "cpu" or not (failed or is_out_of_memory(error)):
                raise
            release_frames(error)
            if failed:  # the host's tiles would give another picture
                no_stripes = str(error)
                log.warning("Ballast: decoding in stripes failed (%s); trying the CPU", no_stripes)
            else:
                log.warning("Ballast: decoding does not fit, in tiles neither; trying the CPU")
        else:
            break
    images = torch.cat(done)
    if images.ndim not in (4, 5):
        raise ValueError(f"this VAE makes {list(images.shape)}, which are no pictures. Use the node for its kind.")
    name = type(vae.first_stage_model).__name__
    said = [f"{name} in float32 on {device}, now gone", *ways, f"{time.monotonic() - started:.1f} s"]
    return Decoded(images.flatten(0, -4), "; ".join(said))


def _mixes_pictures(module: nn.Module) -> bool:
    """Return whether the pictures of a batch are frames of one video, as Stable Video Diffusion's VAE takes them."""
    return any("mix_factor" in name for name, _ in tensors_of(module))


@contextmanager
def _double_on(device: torch.device, vae: Any, module: nn.Module, no_stripes: str) -> Iterator[Any]:
    double = _double(vae, module, device, no_stripes)
    try:
        yield double
    except BaseException as error:
        release_frames(error)  # they hold its activations
        gc.collect()
        raise
    finally:
        host.evict([double.patcher])


class _Careful:
    """A VAE's module, whose `decode` goes in stripes where the host's estimate of decoding whole does not fit.

    `no_stripes` says why stripes failed before, if they did. The way is added to `ways`, in words.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        whole_bytes: Callable[[torch.Tensor], float],
        ways: set[str],
        no_stripes: str,
    ) -> None:
        self._module, self._device, self._whole_bytes = module, device, whole_bytes
        self._ways, self._no_stripes = ways, no_stripes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def decode(self, latents: torch.Tensor, **options: Any) -> torch.Tensor:
        try:
            return self._decode(latents, options)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = " ".join(str(error).split())
            release_frames(error)
        raise torch.OutOfMemoryError(why)  # in the words that make the host go on in tiles

    def _decode(self, latents: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        decode: Callable[..., torch.Tensor] = self._module.decode  # type: ignore[assignment]
        on_cpu = self._device.type == "cpu"
        room = spare_ram_bytes() if on_cpu else Accelerator(self._device).free_bytes()
        if self._whole_bytes(latents) <= room or "output_buffer" in options:  # which is filled as it decodes
            try:
                return decode(latents, **options)
            except Exception as error:
                if not is_out_of_memory(error) or "output_buffer" in options:
                    raise
                release_frames(error)
        if self._no_stripes:
            raise RuntimeError(
                f"decoding in stripes failed ({self._no_stripes}), whole it does not fit the device, and on the CPU it "
                f"takes {format_bytes(int(self._whole_bytes(latents)))} of RAM, of which {format_bytes(room)} can be "
                "had. Choose a smaller size or fewer frames, or VAE Decode (Tiled)."
            )
        if any(tensor.device != latents.device for tensor in self._module.parameters()):
            raise torch.OutOfMemoryError("the weights are not all on the device, where stripes need them")
        share = CPU_SHARE if on_cpu else _SHARE
        budget_bytes = max(0, min(int(share * room), room - (host.reserve_bytes(self._device) or 0)))
        log.info("Ballast: decoding in stripes, in %s", format_bytes(budget_bytes))
        try:
            made = striped.run(
                functools.partial(decode, **options),
                latents,
                device=latents.device,
                budget_bytes=budget_bytes,
                ram_bytes=spare_ram_bytes(),
                on_stripe=host.throw_if_interrupted,
            )
        except Exception as error:
            if host.is_interrupt(error) or (is_out_of_memory(error) and not on_cpu):
                raise
            why, no_ram = str(error), isinstance(error, striped.OutOfRamError)
            release_frames(error)
        else:
            self._ways.add(Way("stripes").note)
            return made
        if on_cpu:  # there is nothing left to try but this
            log.warning("Ballast: decoding in stripes failed (%s); trying whole", why)
            return decode(latents, **options)
        if no_ram:
            log.warning("Ballast: decoding in stripes does not fit (%s)", why)
            raise torch.OutOfMemoryError("this VAE fits neither whole nor in stripes")
        raise _StripesError(why)


def _double(vae: Any, module: nn.Module, device: torch.device, no_stripes: str) -> Any:
    """Return the VAE as it is, with another module, all in float32 and its results on the CPU.

    `ways` says how it decoded.
    """
    from comfy.model_patcher import ModelPatcher

    double = copy.copy(vae)
    double.first_stage_model, double.vae_dtype, double.size = module, torch.float32, None
    double.disable_offload = True  # all weights on the device: stripes read them later than the host casts them

    def whole_bytes(z: torch.Tensor) -> float:
        return vae.memory_used_decode(z.shape, torch.float32)

    double.ways = set()
    double.first_stage_model = _Careful(module, device, whole_bytes, double.ways, no_stripes)
    for name in filter(functools.partial(hasattr, double), _TILED):
        setattr(double, name, _noted(getattr(double, name), double.ways))
    double.device, double.output_device = device, torch.device("cpu")
    double.vae_output_dtype = lambda: torch.float32
    double.process_output = _checked(vae.process_output)
    double.patcher = ModelPatcher(module, load_device=device, offload_device=torch.device("cpu"))
    double.patcher.patches = dict(vae.patcher.patches)
    double.patcher.object_patches = dict(vae.patcher.object_patches)
    return double


def _noted(tiled: Callable[..., Any], ways: set[str]) -> Callable[..., Any]:
    """Wrap a method that decodes in tiles: record that, and not the stripes of each tile."""

    @functools.wraps(tiled)
    def noted(*args: Any, **kwargs: Any) -> Any:
        made = tiled(*args, **kwargs)
        ways.clear()
        ways.add(Way("tiles").note)
        return made

    return noted


def _checked(process: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Wrap `process` to refuse pixels that are not finite, before it clamps them."""

    def checked(pixels: torch.Tensor) -> torch.Tensor:
        check_finite(pixels, "the decoder made")
        return process(pixels)

    return checked
