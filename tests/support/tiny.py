"""Tiny random-weight pipelines, one per model family: build, save, and run whole with stock diffusers.

    folder = tiny.save("flux", tmp_path / "flux")
    latent, image = tiny.stock(folder, "a red boat", "blurry")

Run this file to check that every family gives finite pictures that depend on the prompt and on the guidance.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from tiny_image import IMAGES
from tiny_parts import Family
from tiny_video import VIDEOS

__all__ = ["FAMILIES", "Family", "family_of", "proportions", "save", "stock"]


def _fill_zeros(module: torch.nn.Module) -> None:
    """Give zero-initialised weights small random values, or whole branches would do nothing."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.normal_(std=0.05)


def seeded(build: Callable[[], DiffusionPipeline]) -> Callable[[], DiffusionPipeline]:
    """Make a builder repeatable, and its pipeline ready to run."""

    def built() -> DiffusionPipeline:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            pipe: Any = build()
            for part in pipe.components.values():
                if isinstance(part, torch.nn.Module):
                    _fill_zeros(part)
                    part.float().eval().requires_grad_(False)
        return pipe

    return built


FAMILIES: dict[str, Family] = {
    family.name: dataclasses.replace(family, build=seeded(family.build)) for family in [*IMAGES, *VIDEOS]
}


def save(name: str, folder: Path) -> Path:
    """Write the family's pipeline in the diffusers layout and return the folder."""
    FAMILIES[name].build().save_pretrained(folder, safe_serialization=True)
    return folder


def family_of(folder: Path) -> Family:
    """The family that was saved in a folder: by the folder's name, else by the class of the pipeline."""
    if folder.name in FAMILIES:
        return FAMILIES[folder.name]
    class_name = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    return next(family for family in FAMILIES.values() if family.class_name == class_name)


def proportions(folder: Path) -> dict[str, int]:
    """Bytes of weights by component, without the headers of the files."""
    sizes: dict[str, int] = {}
    for file in sorted(folder.glob("*/*.safetensors")):
        with file.open("rb") as opened:
            header = 8 + int.from_bytes(opened.read(8), "little")
        sizes[file.parent.name] = sizes.get(file.parent.name, 0) + file.stat().st_size - header
    return sizes


def stock(
    folder: Path,
    prompt: str = "a red boat",
    negative_prompt: str | None = "blurry, grey",
    steps: int = 2,
    seed: int = 0,
    guidance: float | None = None,
    width: int | None = None,
    height: int | None = None,
    frames: int | None = None,
    scheduler: Any = None,
    listen: Callable[[Any], Any] = id,
    **kw: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a saved pipeline whole and unmodified, in float32 on the CPU.

    Returns the latent that `vae.decode` was given, and the picture in 0..1 as [B, H, W, 3] or, for a video,
    [B, F, H, W, 3]. It runs with `scheduler`, by default its own. What is left out, and the family's own
    arguments, come from FAMILIES; `kw` adds to those arguments or replaces them. `listen` sees the pipeline first.
    """
    family = family_of(folder)
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    if scheduler is not None:
        pipe.scheduler = scheduler
    width, height = width or family.size[0], height or family.size[1]
    if family.prepare is not None:
        family.prepare(pipe, width, height)
    guidance = family.guidance if guidance is None else guidance
    arguments: dict[str, Any] = {
        "prompt": prompt,
        "num_inference_steps": steps,
        "generator": torch.Generator("cpu").manual_seed(seed),
        "width": width,
        "height": height,
        "output_type": "np",
        **({"negative_prompt": negative_prompt} if family.negative else {}),
        **({"num_frames": frames or family.frames} if family.frames else {}),
    }
    if family.guidance_name == "guider":
        pipe.guider = pipe.guider.new(guidance_scale=guidance)
    else:
        arguments[family.guidance_name] = guidance
    taken = inspect.signature(pipe.__call__).parameters
    arguments.update({key: value for key, value in family.encode_kwargs.items() if key in taken})
    arguments.update({**family.call_kwargs, **kw})

    seen: list[torch.Tensor] = []
    decode = pipe.vae.decode

    def recorded(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(z.detach().clone())
        return decode(z, *args, **kwargs)

    pipe.vae.decode = recorded
    listen(pipe)
    output = pipe(**arguments)
    picture = torch.as_tensor(output.images if family.frames is None else output.frames).float()
    (latent,) = seen
    return latent, picture


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two latents of the same noise differ by more than rounding."""
    return bool((one - other).abs().max() > 1e-3 * one.abs().mean())


def check(name: str, folder: Path) -> tuple[list[str], bool]:
    """One line of the table, and whether all is well."""
    start = time.perf_counter()
    pipe = FAMILIES[name].build()
    built = time.perf_counter()
    pipe.save_pretrained(folder, safe_serialization=True)
    saved = time.perf_counter()
    latent, picture = stock(folder)
    ran = time.perf_counter()
    same = torch.equal(latent, stock(folder)[0])
    other = _differ(latent, stock(folder, prompt="two cats")[0])
    plain = _differ(latent, stock(folder, guidance=1.0)[0])
    guided = {"true_cfg_scale": 4.0} if FAMILIES[name].distilled else {}
    usual = stock(folder, **guided)[0] if guided else latent
    negative = _differ(usual, stock(folder, negative_prompt="bright colours", **guided)[0])
    good = [
        bool(torch.isfinite(latent).all() and torch.isfinite(picture).all()),
        bool(picture.std() > 0.01 and ((picture < 0.001) | (picture > 0.999)).float().mean() < 0.2),
        same,
        other,
        plain,
        negative == FAMILIES[name].negative,
    ]
    seconds = f"{built - start:.2f} {saved - built:.2f} {ran - saved:.2f}"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shapes = f"{list(latent.shape)} {list(picture.shape)}"
    spread = f"{float(latent.std()):.2f} {float(picture.mean()):.2f}+-{float(picture.std()):.2f}"
    marks = " ".join("yes" if mark else "NO" for mark in good)
    return [f"{name:16}", seconds, f"{size / 1024:6.0f} KiB", shapes, spread, marks], all(good)


def main(names: list[str]) -> int:
    """Print the table; the exit status says whether every family passed."""
    print("family | build, save, load and run: s | size | latent, picture | spread of both")
    print("finite, neither flat nor clipped, repeatable, moved by prompt, by guidance, by negative prompt")
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    passed = True
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as temporary:
            cells, good = check(name, Path(temporary) / name)
        print(" | ".join(cells), flush=True)
        passed = passed and good
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def stages(name: str, folder: Path, device: str, **opening: object) -> tuple[object, Callable, Callable, Callable]:
    """An open pipeline of a family, and its three stages with the arguments that `stock` uses."""
    import ballast  # which `python tiny.py` does without

    family = FAMILIES[name]
    pipe = ballast.open_pipeline(folder, device=device, **opening)

    def encode() -> object:
        return pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)

    def sample(cond: object, guidance: float = family.guidance, **more: object) -> torch.Tensor:
        width, height = family.size
        return pipe.sample(
            cond,
            width=width,
            height=height,
            steps=2,
            guidance=guidance,
            frames=family.frames,
            **family.call_kwargs,
            **more,
        )

    def decode(latents: torch.Tensor) -> torch.Tensor:
        temb = {"temb": torch.tensor([family.call_kwargs["decode_timestep"]])} if name == "ltx_timestep" else {}
        return pipe.decode(latents, **temb)

    return pipe, encode, sample, decode
