"""`ballast generate`: runs a pipeline, and writes its pictures or videos."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cards
from .arguments import (
    LOCKSTEP_HELP,
    MODEL_HELP,
    ONCE_HELP,
    add_device_arguments,
    add_model_arguments,
    add_picture_arguments,
    add_step_range_arguments,
    expanded,
    family_arguments,
    model_path,
    sampling_arguments,
    say_opening,
    text_arguments,
)
from .images import PICTURES, VIDEOS, check_film, check_output, open_image, opened_pictures, save_images, save_picture
from .sounds import WAV, part_of, write_wav

if TYPE_CHECKING:
    import torch

    from ..memory.reports.timeline import Event
    from ..memory.weights.unit import ManagedModel
    from ..pipelines import Pipeline

LATENT = ".latent"  # the end of a file of latents, as ComfyUI's Save Latent names it
NO_SOUND = "the latents have no sound: a copy of them, or ComfyUI's Save Latent, keeps the pictures alone."
SIM_BYTES = "64MB"  # the simulated card of a machine without a GPU


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_device_arguments(parser)
    add_model_arguments(parser)
    add_step_range_arguments(parser)
    parser.add_argument("--model", type=model_path, required=True, help=MODEL_HELP)
    parser.add_argument("--prompt", default="", help="what to show")
    parser.add_argument(
        "--latent",
        type=expanded,
        help="decode this file, which a run that failed has left, and no more; with --start-step go on from it",
    )
    add_picture_arguments(parser)
    parser.add_argument("--denoise", type=float, help="NewBie: how much of the picture to replace, up to 1")
    parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks")
    parser.add_argument("--attention", default="auto", help="one of diffusers' attention backends, such as sage")
    parser.add_argument("--once", action="store_true", help=ONCE_HELP)
    parser.add_argument("--lockstep", action="store_true", help=LOCKSTEP_HELP)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with --cache, run without it first, and tell by how many dB the latents differ",
    )
    parser.add_argument("--cards", type=int, default=1, help="draw each picture on so many cards of this machine")
    parser.add_argument(
        "--out",
        type=expanded,
        required=True,
        help="a .png, .jpg or .webp; for a video .mp4, .webp, .gif, or a .png for each frame; for sound alone a .wav; "
        "--end-step: a .latent",
    )
    parser.add_argument("--timeline", type=expanded, help="also draw VRAM over time to this .png")


def run(arguments: argparse.Namespace, cache_dir: Path | None = None) -> int:
    """Encode, sample, decode and write, all or part of that. Raises ValueError for bad options."""
    if arguments.start_step and not arguments.latent:
        raise ValueError(f"--start-step is {arguments.start_step}, but there is nothing to go on from. Give --latent.")
    if arguments.start_step and not arguments.prompt:
        raise ValueError("a run with --start-step needs its --prompt. Give it.")
    if arguments.latent and arguments.end_step and not arguments.start_step:
        raise ValueError("a --latent is decoded without --start-step. Give that, or leave --end-step out.")
    if not arguments.prompt and not arguments.latent:
        raise ValueError("there is nothing to draw. Give a --prompt, or a --latent to decode.")
    cards.check(arguments.cards, arguments.device)
    if arguments.latent and arguments.cards > 1:
        raise ValueError("a --latent is decoded on one card. Leave --cards out.")
    if not cards.launched():
        say_opening(arguments.model)
    _check_files(arguments.out, arguments.timeline, arguments.end_step)
    if arguments.cards > 1 and not cards.launched():
        return cards.launch(arguments.cards, run, arguments)
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    from ..memory import simulated

    if arguments.device.split(":")[0] == simulated.DEVICE_TYPE:
        simulated.enable(total=arguments.vram or SIM_BYTES)
    transformers_logging.disable_progress_bar()
    diffusers_logging.disable_progress_bar()
    with cards.group(arguments.cards, arguments.device, arguments.ram) as (device, ram):
        return _run(arguments, cache_dir, device, ram)


def _run(arguments: argparse.Namespace, cache_dir: Path | None, device: str, ram: str | int | None) -> int:
    from ..pipelines import open_pipeline
    from ..pipelines.decoding.rescue import load_latents, rescued, save_latents

    pipe = open_pipeline(
        arguments.model,
        device,
        arguments.vram,
        ram,
        arguments.dtype,
        cache_dir=cache_dir,
        **family_arguments(arguments),
    )
    if not arguments.end_step:
        check_output(arguments.out, pipe.is_video, pipe.title, pipe.makes_sound)
        check_film(arguments.out.suffix)
    with pipe.manager.timeline.watched(_ReadingBar()), contextlib.ExitStack() as exits:
        exits.callback(pipe.manager.stop_reading)  # for what does not come where a stage fails
        latents = load_latents(arguments.latent) if arguments.latent else None
        if latents is None or arguments.start_step:
            latents = _sample(pipe, arguments, latents)
        if not cards.is_first(arguments.cards):
            return 0
        if arguments.end_step:
            save_latents(latents, arguments.out, {"prompt": arguments.prompt})
            print(f"\n{pipe.manager.timeline.table()}\n\nwrote {arguments.out}")
            return 0
        pipe.check_latents(latents)
        advice = "Decode it with ballast generate --latent, and --model and --out."
        with rescued(latents, arguments.out.parent, arguments.out.stem, {"prompt": arguments.prompt or ""}, advice):
            written = _write(pipe, latents, arguments.out)
    print(f"\n{pipe.manager.timeline.table()}\n\nwrote {', '.join(map(str, written))}")
    if arguments.timeline:
        save_picture(pipe.manager.timeline.picture(), arguments.timeline)
        print(f"wrote {arguments.timeline}")
    return 0


def _write(pipe: Pipeline, latents: torch.Tensor, out: Path) -> list[Path]:
    """Decode latents and write what they become: pictures, videos with their sound, or the sound of a video alone."""
    if out.suffix.lower() != WAV:
        made = pipe.decode_all(latents)
        if pipe.makes_sound and "sound" not in made:
            print(f"Note: {NO_SOUND}")
        return save_images(made["images"], out, pipe.frame_rate, made.get("sound"))
    if (sound := pipe.decode_sound(latents)) is None:
        raise ValueError(NO_SOUND)
    written = []
    for number in range(len(sound.waveform)):
        written.append(out.with_stem(f"{out.stem}-{number}") if number else out)
        write_wav(part_of(sound, number), written[-1])
    return written


def _check_files(out: Path, timeline: Path | None, end_step: int | None) -> None:
    """Raise ValueError, ImportError or OSError, in one line, for files that could not be written at the end."""
    from ..memory.files import check_file

    if end_step and out.suffix.lower() != LATENT:
        raise ValueError(f"a run with --end-step leaves latents, no picture. Give --out {out.with_suffix(LATENT)}.")
    if end_step and timeline:
        raise ValueError("--timeline is of a whole run. Leave it out, or --end-step.")
    kinds = [LATENT] if end_step else [*PICTURES, *(suffix for suffix in VIDEOS if suffix not in PICTURES), WAV]
    for path, known in ((out, kinds), (timeline, PICTURES)):
        if path is None:
            continue
        if path.suffix.lower() not in known:
            raise ValueError(f"cannot write {path}. Use a name that ends in {', '.join(known)}.")
        check_file(path)
    if timeline and timeline.resolve() == out.resolve():
        raise ValueError(f"--out and --timeline are both {out}. Name two files.")


def _sample(pipe: Pipeline, arguments: argparse.Namespace, latents: torch.Tensor | None) -> torch.Tensor:
    from tqdm import tqdm

    further = sampling_arguments(arguments) | ({} if arguments.denoise is None else {"denoise": arguments.denoise})
    images, pictures = opened_pictures(arguments, pipe.edits)
    if pipe.starts_from_latents and arguments.image:
        picture = open_image(arguments.image[0], arguments.width, arguments.height)
        further["init_latents"] = pipe.followed_by("encode", "sample", "decode").encode_image(picture)
        pictures.pop("image")
    pipe.check_cards(arguments.cards, compile=arguments.compile, attention=arguments.attention)
    first = cards.is_first(arguments.cards)  # which decodes
    conditioning = cards.encoded_once(
        arguments.cards,
        lambda: pipe.followed_by("sample", "decode").encode(
            arguments.prompt, arguments.negative, images=images, **text_arguments(arguments)
        ),
    )
    for note in [*conditioning.notes, *pipe.sampling_notes(conditioning, arguments.guidance, **further)]:
        print(f"Note: {note}")
    with tqdm(desc="sample", unit="step", disable=not first) as bar:

        def on_step(step: int, steps: int, _: object) -> None:
            bar.total = steps
            bar.update(step - bar.n)  # parts of a batch may be drawn anew

        return cards.sampler(pipe.followed_by("decode") if first else pipe, arguments.cards).sample(
            conditioning,
            width=arguments.width,
            height=arguments.height,
            steps=arguments.steps,
            guidance=arguments.guidance,
            seed=arguments.seed,
            frames=arguments.frames,
            batch=arguments.batch,
            cards=arguments.cards,
            strategy=arguments.strategy,
            compile=arguments.compile,
            attention=arguments.attention,
            once=arguments.once,
            lockstep=arguments.lockstep,
            latents=latents,
            measure=arguments.measure,
            on_step=on_step,
            **pictures,
            **further,
        )


class _ReadingBar:
    """Shows a bar for each model that is being read from disk, or converted."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __call__(self, event: Event, unit: ManagedModel) -> None:
        from tqdm import tqdm

        if event.kind in ("read", "reading", "converting") and unit.name not in self._bars:
            doing = "convert" if event.kind == "converting" else "read"
            made = tqdm(desc=f"{doing} {unit.name}", unit="B", unit_scale=True, leave=False, mininterval=0)
            self._bars[unit.name] = made
        if (bar := self._bars.get(unit.name)) is None or event.kind not in ("read", "reading", "converting", "load"):
            return
        read = 0 if event.kind == "read" else event.bytes
        bar.total = event.bytes if event.kind == "read" else event.total_bytes or bar.total
        bar.update((bar.total if event.kind == "load" else read) - bar.n)
        if event.kind == "load" or read == bar.total:
            self._bars.pop(unit.name).close()
