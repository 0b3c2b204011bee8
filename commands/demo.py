"""`ballast demo`: draws a picture with the bundled model, on a simulated GPU where there is none."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from . import generate
from .arguments import DEMO, add_device_arguments, expanded

PROMPT = "a red circle on a blue background, left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_device_arguments(parser)
    parser.add_argument("--prompt", default=PROMPT, help='such as "a green square on a white background, right"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--out", type=expanded, default=Path("demo.png"))
    parser.add_argument("--timeline", type=expanded, default=Path("timeline.png"))
    parser.set_defaults(seed=5)


def run(arguments: argparse.Namespace) -> int:
    """Draw the picture and the timeline."""
    from ..memory import simulated
    from ..memory.accelerator import resolve_device

    if no_gpu := arguments.device == "auto" and resolve_device().type == "cpu":
        arguments.device = simulated.DEVICE_TYPE
    if arguments.device == simulated.DEVICE_TYPE and (reason := simulated.supported()):
        print(f"The demo runs on the CPU: {reason}.")
        arguments.device = "cpu"
    elif no_gpu:
        print(f"No GPU here: the demo runs on a simulated one of {arguments.vram or generate.SIM_BYTES}, in the CPU.")
    arguments.model, arguments.negative, arguments.dtype = DEMO, "", "auto"
    arguments.width = arguments.height = arguments.frames = None
    arguments.batch = arguments.cards = 1
    arguments.compile, arguments.attention = False, "auto"
    arguments.once = arguments.lockstep = arguments.measure = False
    arguments.start_step = arguments.end_step = None
    for name in ("image", "mask", "last_image", "control", "video", "strength"):
        setattr(arguments, name, None)
    arguments.denoise = arguments.latent = arguments.true_cfg = arguments.max_sequence_length = None
    # A cache of its own, so that each run shows the encoder on the timeline.
    with tempfile.TemporaryDirectory() as cache_dir:
        return generate.run(arguments, Path(cache_dir))
