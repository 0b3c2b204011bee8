"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[1] / "demo" / "shapes"
MODEL_HELP = "a model's folder, or the file of a transformer; demo is the bundled one, which draws simple shapes"
ONCE_HELP = "compute what sees no latents once for all steps, where that takes less time; the picture is the same"
LOCKSTEP_HELP = "let the passes of guidance share each copy of weights, where that takes less time; same picture"

# Options of `sample` that choose how it steps.
SCHEDULING = (
    "scheduler",
    "shift",
    "sigmas",
    "guidance_range",
    "guider",
    "cache",
    "control_strength",
    "control_range",
)


def expanded(text: str) -> Path:
    """Return the path of an argument without its `~`, which a shell leaves in --out=~/x.png and in quotes."""
    return Path(os.path.expanduser(text))  # Path.expanduser raises where nobody has the name behind ~


def model_path(text: str) -> Path:
    """Return a model's folder or file. `demo` is the bundled model; a folder of that name is ./demo."""
    return DEMO if text == "demo" else expanded(text)


def say_opening(model: Path) -> None:
    """Say at once what is being done: importing the libraries and reading the headers of the files take a while."""
    if model.exists():  # else one line says that it does not
        print(f"opening {model}", file=sys.stderr, flush=True)


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device, its budgets and the placement, for commands that run a model."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu, mps, or sim for the simulated GPU")
    parser.add_argument(
        "--vram",
        help="budget such as 8GB, by default all that is free; with --device sim the size of the simulated card",
    )
    parser.add_argument("--ram", help="budget for weights in RAM, such as 24GB")
    parser.add_argument("--seed", type=int, default=0, help="the noise to start from")
    parser.add_argument(
        "--strategy", default="auto", help="auto, resident (whole), streamed, leafwise (with the least VRAM) or cpu"
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the size of a picture and the options of model families, for commands that open any model."""
    parser.add_argument(
        "--negative",
        default="",
        help="what to avoid; counts where guidance, or a distilled model's true_cfg, is above 1",
    )
    parser.add_argument("--width", type=int, help="in pixels, by default as the pipeline is made for")
    parser.add_argument("--height", type=int, help="in pixels, by default as the pipeline is made for")
    parser.add_argument("--frames", type=int, help="frames of a video")
    parser.add_argument("--batch", type=int, default=1, help="pictures of the prompt, with the seeds from --seed on")
    parser.add_argument("--steps", type=int, help="by default as many as the pipeline is made for")
    parser.add_argument(
        "--guidance",
        type=float,
        help="by default that which the pipeline is made for; of Flux-dev, HunyuanVideo and the like their own scale",
    )
    parser.add_argument(
        "--true-cfg",
        type=float,
        help="classifier-free guidance beside a distilled model's own; above 1 each step runs twice",
    )
    parser.add_argument(
        "--scheduler",
        help="a sampler such as euler, dpmpp_2m, unipc or er_sde, or a class of diffusers; by default the model's own",
    )
    parser.add_argument("--shift", type=float, help="towards more noise, above 1; by default the model's own")
    parser.add_argument(
        "--sigmas",
        type=sigmas,
        help="noise levels such as 1,0.75,0.5,0.25, or a schedule: simple, sgm_uniform, beta, karras, "
        "linear_quadratic or bong_tangent",
    )
    parser.add_argument(
        "--guidance-range",
        type=fractions,
        metavar="START-END",
        help="the part of the steps that is guided, such as 0.0-0.6; the others run once",
    )
    parser.add_argument(
        "--guider", help="cfg, cfg_zero_star, apg or tcfg in place of the model's own, for models that have a guider"
    )
    parser.add_argument(
        "--control-strength",
        type=strengths,
        metavar="NUMBER",
        help="how much the picture of a ControlNet counts, by default 1; 0.7,0.5 for two",
    )
    parser.add_argument(
        "--control-range",
        type=ranges,
        metavar="START-END",
        help="the part of the steps that follows it, such as 0.0-0.6; 0.0-0.4,0.4-1.0 for two",
    )
    parser.add_argument(
        "--cache",
        metavar="KIND",
        help="skip the blocks of the transformer in some steps, with loss: static:2, easycache, firstblock, magcache "
        "or seacache",
    )
    parser.add_argument(
        "--max-sequence-length", type=int, help="tokens of a prompt that are read, where the model lets you choose"
    )
    parser.add_argument("--dtype", default="auto", help="auto, bf16, fp16 or fp32")
    parser.add_argument(
        "--weights",
        help="how weights are held: auto (as stored), exact12 (bf16 in 12 bits, without loss), int8 or fp8; the first "
        "run converts them, once, into files in the cache",
    )
    parser.add_argument(
        "--cache-encoded",
        action="store_true",
        default=None,
        help="has no effect any more: what --weights makes is always kept in files",
    )
    parser.add_argument(
        "--lora",
        action="append",
        type=lora,
        metavar="FILE:STRENGTH",
        help="a LoRA's .safetensors file and its strength, by default 1; several have one --lora each; the second "
        "transformer's has low noise in its name, or is low.safetensors:transformer_2=1",
    )
    parser.add_argument(
        "--lora-leave-out",
        metavar="PARTS",
        help="parts that LoRAs have weights for and the model has not, such as k_img,v_img: the rest runs without them",
    )
    parser.add_argument(
        "--controlnet",
        type=expanded,
        action="append",
        help="a ControlNet, a folder in diffusers' layout or a file, which --control is for; one for each --control",
    )
    add_file_arguments(parser)


def add_step_range_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the part of the steps, for commands that run or plan one prompt."""
    parser.add_argument(
        "--start-step", type=int, help="go on at this step, counted from 0, from the --latent of a run that ended there"
    )
    parser.add_argument("--end-step", type=int, help="end before this step, and write the latents to an --out .latent")


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files and folders that a model is made of beside its own, for commands that open any model."""
    parser.add_argument(
        "--llama", type=expanded, help="HiDream-I1: the folder of Llama, if not text_encoder_4 in the model's"
    )
    parser.add_argument("--variant", help="HiDream-I1: full, dev or fast; Pyramid-Flow: 768p, 384p or image")
    parser.add_argument(
        "--base",
        type=expanded,
        help="where the model is the file of a transformer: the diffusers folder of that model, for what has no file; "
        "without it, the configs of the published models that come with Ballast",
    )
    parser.add_argument(
        "--text-encoder",
        type=expanded,
        action="append",
        help="a file of a text encoder; may be given several times",
    )
    parser.add_argument("--transformer-2", type=expanded, help="Wan 2.2: the file of its expert for low noise")
    parser.add_argument("--image-encoder", type=expanded, help="Wan 2.1: the file of what sees the first frame")
    parser.add_argument(
        "--tokenizer",
        type=_tokenizer,
        action="append",
        metavar="KIND=FOLDER",
        help="without --base, the folder of a tokenizer: clip, t5, umt5, qwen or llama; one --tokenizer each",
    )
    for part, of in (
        ("vae", "single files, NewBie and Pyramid-Flow"),
        ("gemma", "NewBie"),
        ("jina", "NewBie"),
    ):
        parser.add_argument(
            f"--{part}", type=expanded, help=f"{of}: that file, where the model is the file of a transformer"
        )
    parser.add_argument(
        "--text", type=expanded, help="Pyramid-Flow: the folder of the text encoders' folders, likewise"
    )


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pictures that a run starts from."""
    parser.add_argument(
        "--image",
        type=expanded,
        action="append",
        help="a picture to start from or to edit, or a first frame; edit models take several, one --image each",
    )
    parser.add_argument("--mask", type=expanded, help="a picture of the same size, white where to paint anew")
    parser.add_argument("--strength", type=float, help="how much of the picture to replace, up to 1")
    parser.add_argument("--last-image", type=expanded, help="the last frame of a video")
    parser.add_argument(
        "--control",
        type=expanded,
        action="append",
        help="a picture or a video of edges, depth or the like, for what follows one; one for each --controlnet",
    )
    parser.add_argument(
        "--video", type=expanded, help="a video to start from: a film, an animation or a folder of frames"
    )


def lora(text: str) -> tuple[Path, float | dict[str, float]]:
    """Return a LoRA's file and its strength, as in detail.safetensors:0.8.

    For one model low.safetensors:transformer_2=0.8.
    """
    file, colon, told = text.rpartition(":")
    model, equals, strength = told.rpartition("=")
    try:
        if not colon:
            return expanded(text), 1.0
        return expanded(file), {model: float(strength)} if equals else float(strength)
    except ValueError:
        return expanded(text), 1.0  # the colon is of a drive


def sigmas(text: str) -> str | list[float]:
    """Return noise levels, as in 1,0.5, or the name of a schedule."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        return text


def fractions(text: str) -> list[float]:
    """Return where a part of the steps starts and ends, as in 0.0-0.6."""
    try:
        start, end = map(float, text.split("-"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no START-END, such as 0.0-0.6") from None
    return [start, end]


def strengths(text: str) -> float | list[float]:
    """Return the strength of a ControlNet, as in 0.7, or of several, as in 0.7,0.5."""
    try:
        found = [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, such as 0.7") from None
    return found if len(found) > 1 else found[0]


def ranges(text: str) -> list[float] | list[list[float]]:
    """Return the part of the steps of a ControlNet, as in 0.0-0.6, or of several, as in 0.0-0.4,0.4-1.0."""
    found = [fractions(part) for part in text.split(",")]
    return found if len(found) > 1 else found[0]


def _tokenizer(text: str) -> tuple[str, Path]:
    kind, equals, folder = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no KIND=FOLDER, such as clip=path/to/tokenizer")
    return kind, expanded(folder)


def text_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return options of `encode` that were given."""
    longest = arguments.max_sequence_length
    return {} if longest is None else {"max_sequence_length": longest}


def sampling_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return options of `sample` that were given."""
    names = ("true_cfg", *SCHEDULING, "start_step", "end_step")
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def family_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """LoRAs, files beside a model's, and arguments of its family, that were given, by the names of `open_pipeline`."""
    several = {"text_encoder": "text_encoders", "tokenizer": "tokenizers", "lora": "loras"}
    names = (
        "llama",
        "variant",
        "gemma",
        "jina",
        "vae",
        "text",
        "base",
        "transformer_2",
        "image_encoder",
        "weights",
        "cache_encoded",
        "controlnet",
        *several,
    )
    given = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    if "lora" in given and arguments.lora_leave_out:
        given["lora"] = [(*each, arguments.lora_leave_out) for each in given["lora"]]
    return {several.get(name, name): value for name, value in given.items()}
