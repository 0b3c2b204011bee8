"""`ballast demo | generate | plan | doctor | bench`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import plan as plan_command

if TYPE_CHECKING:
    import torch

    from ..memory.timeline import Event
    from ..memory.units.unit import ManagedModel
    from ..pipelines import StagedPipeline

DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "shapes"
DEMO_PROMPT = "a red circle on a blue background, left"
_OUTPUTS = (".png", ".jpg", ".webp", ".gif", ".mp4")
_SIM_BYTES = "64MB"  # the simulated card of a machine without a GPU


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 if all went well, 1 for an error that has been told in one line."""
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return arguments.run(arguments)
    except Exception as error:
        if os.environ.get("BALLAST_TRACEBACK"):
            raise
        print(f"ballast: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ballast: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ballast", description="Run diffusion transformers that do not fit in VRAM.")
    commands = parser.add_subparsers(required=True, metavar="demo | generate | plan | doctor | bench")

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu, mps, or sim for the simulated GPU")
    shared.add_argument(
        "--vram",
        help="budget such as 8GB, by default all that is free; with --device sim the size of the simulated card",
    )
    shared.add_argument("--ram", help="budget for weights in RAM, such as 24GB")
    shared.add_argument("--seed", type=int, default=0, help="the noise to start from")
    shared.add_argument(
        "--strategy", default="auto", help="auto, resident (whole), streamed (by blocks), leafwise (by layers) or cpu"
    )

    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--negative", default="", help="what to avoid; counts where guidance is above 1")
    run.add_argument("--width", type=int, help="in pixels, by default as the pipeline is made for")
    run.add_argument("--height", type=int, help="in pixels, by default as the pipeline is made for")
    run.add_argument("--frames", type=int, help="frames of a video")
    run.add_argument("--steps", type=int, help="by default as many as the pipeline is made for")
    run.add_argument("--guidance", type=float, help="by default that which the pipeline is made for")
    run.add_argument("--dtype", default="auto", help="auto, bf16, fp16 or fp32")
    run.add_argument("--llama", type=Path, help="HiDream-I1: the folder of Llama, if not text_encoder_4 in the model's")
    run.add_argument("--variant", help="HiDream-I1: full, dev or fast; Pyramid-Flow: 768p, 384p or image")
    for part, of in (("gemma", "NewBie"), ("jina", "NewBie"), ("vae", "NewBie, Pyramid-Flow")):
        run.add_argument(f"--{part}", type=Path, help=f"{of}: that file, where the model is the file of a transformer")
    run.add_argument("--text", type=Path, help="Pyramid-Flow: the folder of the text encoders' folders, likewise")

    demo = commands.add_parser("demo", parents=[shared], help="draw a picture with the bundled model")
    demo.add_argument("--prompt", default=DEMO_PROMPT, help='such as "a green square on a white background, right"')
    demo.add_argument("--steps", type=int, default=20)
    demo.add_argument("--guidance", type=float, default=4.0)
    demo.add_argument("--out", type=Path, default=Path("demo.png"))
    demo.add_argument("--timeline", type=Path, default=Path("timeline.png"))
    demo.set_defaults(run=_demo, seed=5)

    generate = commands.add_parser("generate", parents=[shared, run], help="run a diffusers pipeline folder")
    generate.add_argument("--model", type=Path, required=True, help="a model's folder, or the file of a transformer")
    generate.add_argument("--prompt", default="", help="what to show")
    generate.add_argument("--latent", type=Path, help="decode this file, which a run that failed has left, and no more")
    generate.add_argument("--image", type=Path, help="a picture to start from (NewBie, Pyramid-Flow)")
    generate.add_argument("--denoise", type=float, help="NewBie: how much of the picture to replace, up to 1")
    generate.add_argument("--compile", action="store_true", help="compile the transformer's blocks")
    generate.add_argument("--attention", default="auto", help="one of diffusers' attention backends, such as sage")
    generate.add_argument(
        "--out",
        type=Path,
        required=True,
        help="a .png, .jpg or .webp; for a video .mp4, .webp, .gif, or a .png for each frame",
    )
    generate.add_argument("--timeline", type=Path, help="also draw VRAM over time to this .png")
    generate.set_defaults(run=_generate)

    plan = commands.add_parser(
        "plan", parents=[run], help="say what a run would take, and why, without loading anything"
    )
    plan_command.add_arguments(plan)
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser("doctor", help="say what this machine has, and what is missing")
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser(
        "bench", help="measure how fast models stream", usage="ballast bench stream | peers | plans | newbie [-h] ..."
    )
    bench.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    bench.set_defaults(run=_bench)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from ..memory import simulated
    from ..memory.accelerator import resolve_device

    if no_gpu := arguments.device == "auto" and resolve_device().type == "cpu":
        arguments.device = simulated.DEVICE_TYPE
    if arguments.device == simulated.DEVICE_TYPE and (reason := simulated.supported()):
        print(f"The demo runs on the CPU: {reason}.")
        arguments.device = "cpu"
    elif no_gpu:
        print(f"No GPU here: the demo runs on a simulated one of {arguments.vram or _SIM_BYTES}, in the CPU.")
    arguments.model, arguments.negative, arguments.dtype = DEMO_FOLDER, "", "auto"
    arguments.width = arguments.height = arguments.frames = None
    arguments.compile, arguments.attention = False, "auto"
    arguments.image = arguments.denoise = arguments.latent = None
    # A cache of its own, so that the encoder is seen to come and go each time.
    with tempfile.TemporaryDirectory() as cache_dir:
        return _generate(arguments, Path(cache_dir))


def _generate(arguments: argparse.Namespace, cache_dir: Path | None = None) -> int:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    from ..memory import simulated
    from ..pipelines import open_pipeline
    from ..pipelines.decoding.rescue import load_latents, rescued

    if not arguments.prompt and not arguments.latent:
        raise ValueError("there is nothing to draw. Give a --prompt, or a --latent to decode.")
    if arguments.device.split(":")[0] == simulated.DEVICE_TYPE:
        simulated.enable(total=arguments.vram or _SIM_BYTES)
    if arguments.out.suffix.lower() not in _OUTPUTS:
        raise ValueError(f"cannot write {arguments.out}. Use a name that ends in {', '.join(_OUTPUTS)}.")
    transformers_logging.disable_progress_bar()
    diffusers_logging.disable_progress_bar()
    pipe = open_pipeline(
        arguments.model,
        arguments.device,
        arguments.vram,
        arguments.ram,
        arguments.dtype,
        cache_dir=cache_dir,
        **plan_command.family_arguments(arguments),
    )
    with pipe.manager.timeline.watched(_ReadingBar()):
        latents = load_latents(arguments.latent) if arguments.latent else _sample(pipe, arguments)
        pipe.check_latents(latents)
        advice = "Decode it with --latent."
        with rescued(latents, arguments.out.parent, arguments.out.stem, {"prompt": arguments.prompt or ""}, advice):
            images = pipe.decode(latents)
    written = save_images(images, arguments.out, pipe.frame_rate)
    if arguments.timeline:
        pipe.manager.timeline.picture().save(arguments.timeline)
        written.append(arguments.timeline)
    print(f"\n{pipe.manager.timeline.table()}\n\nwrote {', '.join(map(str, written))}")
    return 0


def _sample(pipe: StagedPipeline, arguments: argparse.Namespace) -> torch.Tensor:
    from tqdm import tqdm

    further = {} if arguments.denoise is None else {"denoise": arguments.denoise}
    if arguments.image:
        if not pipe.starts_from_latents:
            raise ValueError(f"{pipe.title} starts from noise only. Leave --image out.")
        further["init_latents"] = pipe.encode_image(_open_image(arguments.image, arguments.width, arguments.height))
    conditioning = pipe.encode(arguments.prompt, arguments.negative)
    for note in [*conditioning.notes, *pipe.sampling_notes(conditioning, arguments.guidance, **further)]:
        print(f"Note: {note}")
    with tqdm(desc="sample", unit="step") as bar:

        def on_step(step: int, steps: int, _: object) -> None:
            bar.total = steps
            bar.update()

        return pipe.sample(
            conditioning,
            width=arguments.width,
            height=arguments.height,
            steps=arguments.steps,
            guidance=arguments.guidance,
            seed=arguments.seed,
            frames=arguments.frames,
            strategy=arguments.strategy,
            compile=arguments.compile,
            attention=arguments.attention,
            on_step=on_step,
            **further,
        )


class _ReadingBar:
    """A bar for each model that is read from disk, which goes when it has been read."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, event: Event, unit: ManagedModel) -> None:
        from tqdm import tqdm

        if event.kind == "read":
            self._bar = tqdm(total=event.bytes, desc=f"read {unit.name}", unit="B", unit_scale=True, leave=False)
        elif event.kind in ("reading", "load") and self._bar is not None:
            self._bar.update(event.bytes - self._bar.n)
            if event.kind == "load":
                self._bar.close()


def _open_image(path: Path, width: int | None, height: int | None):  # noqa: ANN202
    """A picture as [1,H,W,3] in 0..1, in another size if one is asked for."""
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    if width or height:
        picture = picture.resize((width or picture.width, height or picture.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]


def save_images(images, out: Path, frame_rate: int = 24) -> list[Path]:  # noqa: ANN001
    """Write pictures [B,H,W,3] or videos [B,F,H,W,3] in 0..1; the second and further ones get a number.

    A video becomes a film (.mp4), an animation (.webp, .gif) or a numbered .png for each frame. Returns the files.
    """
    from PIL import Image

    written = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, item in enumerate((images * 255).round().byte().numpy()):
        path = out.with_stem(f"{out.stem}-{number}") if number else out
        frames = [Image.fromarray(frame) for frame in (item if item.ndim == 4 else item[None])]
        if path.suffix == ".mp4":
            _save_film(frames, path, frame_rate)
            written.append(path)
        elif len(frames) > 1 and path.suffix in (".webp", ".gif"):
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 // frame_rate, loop=0)
            written.append(path)
        elif len(frames) > 1:
            for index, frame in enumerate(frames):
                written.append(path.with_stem(f"{path.stem}-{index:04}"))
                frame.save(written[-1])
        else:
            frames[0].save(path)
            written.append(path)
    return written


def _save_film(frames: Sequence[Any], path: Path, frame_rate: int) -> None:
    """Write pictures as H.264. ImportError, with what to install, without PyAV."""
    try:
        import av
    except ImportError as error:
        raise ImportError(f"writing {path.name} needs PyAV: pip install av. Or use .webp, .gif or .png.") from error
    with av.open(str(path), "w") as film:
        stream = film.add_stream("libx264", rate=frame_rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            film.mux(stream.encode(av.VideoFrame.from_image(frame)))
        film.mux(stream.encode())


def _plan(arguments: argparse.Namespace) -> int:
    print(plan_command.run(arguments))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import examine
    from .memory.tables import format_table

    findings = examine()
    rows = [("ok" if finding.ok else "MISS", finding.what, finding.detail) for finding in findings]
    print(format_table(rows, heading=False))
    return 0 if all(finding.ok for finding in findings) else 1


def _bench(arguments: argparse.Namespace) -> int:
    try:
        from .. import bench
    except ImportError as error:
        raise RuntimeError("bench is not part of this install. Clone the repository and run it from there.") from error
    return bench.main(arguments.rest)


if __name__ == "__main__":
    sys.exit(main())
