"""Save the latents when decoding fails, in a file that ComfyUI's Load Latent opens."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ...memory.files import cache_home, replace_file
from ..encoding.conditioning import to_host
from ..sampling.latents import (
    WrongLatentsError,
    check_finite,
    check_latents,
    noise_of,
    note_noise,
    note_sound,
    sound_of,
)
from ..sampling.step_range import StepRange, left_by, mark

log = logging.getLogger("ballast")

_STEPS = "ballast_steps"  # of latents that a run left early: start, end and number of its steps, dtypes
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, None)}
_SOUND = "ballast_sound_{}"  # the tensor of the sound of each video, which ComfyUI's own nodes do not read
_NOISE = "ballast_noise_{}"  # the state of the generator that the decoder draws noise of
_LONGEST = 200  # bytes of a name, of 255 that file systems take


class DecodeError(RuntimeError):
    """Decoding failed, and the latent is saved. The message says why, names the file, and what to do with it."""

    __module__ = "ballast"  # see `DoesNotFitError`


def save_latents(latents: torch.Tensor, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write latents in the format of ComfyUI's Save Latent, whole or not at all, with those of their sound.

    OSError if the disk says no.
    """
    from safetensors.torch import save

    # An empty tensor of this name says that they are not scaled.
    tensors = {"latent_tensor": latents.detach().cpu().contiguous(), "latent_format_version_0": torch.tensor([])}
    tensors |= {_SOUND.format(i): each.detach().cpu().contiguous() for i, each in enumerate(sound_of(latents))}
    tensors |= {_NOISE.format(i): state for i, state in enumerate(noise_of(latents))}
    facts = dict(metadata or {})
    if (left := left_by(latents)) is not None:
        facts[_STEPS] = f"{left.start} {left.end} {left.steps} {left.loop} {left.model}"
    replace_file(path, save(tensors, facts))


def load_latents(path: Path) -> torch.Tensor:
    """Latents that `save_latents` or ComfyUI's Save Latent wrote, as they are decoded. ValueError for another file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if "latent_format_version_0" not in file.keys():  # noqa: SIM118
                raise ValueError(f"{path} holds no latent of ComfyUI's format.")
            latents = to_host(file.get_tensor("latent_tensor"))
            left = (file.metadata() or {}).get(_STEPS)
            names = [name for i in range(len(latents)) if (name := _SOUND.format(i)) in file.keys()]  # noqa: SIM118
            sound = [to_host(file.get_tensor(name)) for name in names]
            names = [name for i in range(len(latents)) if (name := _NOISE.format(i)) in file.keys()]  # noqa: SIM118
            noise = [file.get_tensor(name) for name in names]
    except SafetensorError as error:
        raise ValueError(f"{path} is no latent, or damaged ({error}).") from error
    for each in (latents, *sound):
        check_latents(each)
    note_sound(latents, sound)
    note_noise(latents, noise)
    if left is not None:
        try:
            *steps, loop, model = left.split()
            start, end, count = map(int, steps)
            mark(latents, StepRange(start, end, count, loop=_DTYPES[loop], model=_DTYPES[model]))
        except (ValueError, KeyError):
            raise ValueError(f"{path} does not say at which step it was left ({left[:80]!r}).") from None
    return latents


@contextmanager
def rescued(
    latents: torch.Tensor,
    folder: Path,
    name: str,
    metadata: Mapping[str, str],
    advice: str,
    is_interrupt: Callable[[BaseException], bool] = lambda error: False,
) -> Iterator[None]:
    """If the block, which decodes `latents`, fails, save them as `name`_00001_.latent, or a higher number, in `folder`.

    Where that takes none, as a disk that is full, they go to Ballast's cache, else to the folder of temporary files.
    Raises DecodeError then. What is no latent is not saved, nor that of another model, which a wrong wire brought here;
    and interrupts are none of a failure's business.
    """
    try:
        yield
    except Exception as error:
        if is_interrupt(error) or isinstance(error, WrongLatentsError) or not _worth_keeping(latents):
            raise
        for place in (folder, cache_home() / "latents", Path(tempfile.gettempdir())):
            if path := _saved(latents, place, name, metadata):
                said = str(error).rstrip(".") or type(error).__name__
                kept = f"The latent is not lost: it is in {path}. {advice}"
                raise DecodeError(f"{said}. {kept}") from error
        raise


def _saved(latents: torch.Tensor, folder: Path, name: str, metadata: Mapping[str, str]) -> Path | None:
    """Where in the folder the latents are now; None if it takes none."""
    path = None
    name = os.fsencode(name)[:_LONGEST].decode(errors="ignore")
    try:
        path = _claimed(folder, name)
        save_latents(latents, path, metadata)
    except OSError as refused:
        if path is not None:
            path.unlink(missing_ok=True)
        log.error("Ballast: the latent cannot be saved in %s: %s", folder, refused)
        return None
    return path


def _claimed(folder: Path, name: str) -> Path:
    """Create an empty file with the next free number, so that no other process takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / f"{name}_{number:05}_.latent"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("unreachable")


def _worth_keeping(latents: object) -> bool:
    try:
        check_latents(latents)
        check_finite(latents, "")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True
