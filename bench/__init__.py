"""Measures: the streaming engine against the bound, and Ballast against its peers. Not part of what ComfyUI installs.

`main` is what `ballast bench` hands its arguments to. The figures go to a JSON file, most with a picture of it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

SIZES = ("tiny", "tiny-newbie", "tiny-hidream", "newbie", "hidream")
_SIZE_HELP = "tiny: some MB; newbie: 7 GB; hidream: 34 GB; tiny-newbie, tiny-hidream: small ones of the same classes"
_DEVICE, _OWN_DEVICE = "auto (a GPU, else sim), sim, cuda, or cpu", "auto (a GPU, else cpu), cuda, or cpu"


def main(argv: Sequence[str]) -> int:
    """Run `stream`, `peers`, `plans`, `caches`, `newbie`, `load`, `codecs` or `gpu`. Returns the exit status."""
    from ..memory.files import check_folder

    arguments = _parser().parse_args(argv)
    if arguments.out:
        check_folder(arguments.out)
    if arguments.section == "gpu":
        from . import gpu

        return gpu.run(arguments.dry, arguments.seconds, arguments.only, arguments.out)
    from . import harness

    request = {key: value for key, value in vars(arguments).items() if key not in ("section", "out", "models")}
    status = 0
    if arguments.section == "stream":
        from . import published, stream

        models = list(published.MODELS) if arguments.models is None else arguments.models
        if models != ["none"]:
            status = harness.show("published", {"models": models, "dry": arguments.dry}, arguments.out)
        request |= {"ratios": stream.RATIOS, "shares": stream.SHARES, "weights": ["auto"]}
    return harness.show(arguments.section, request, arguments.out) or status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ballast bench", description="Measure how fast models stream.")
    commands = parser.add_subparsers(
        required=True, dest="section", metavar="stream | peers | plans | caches | newbie | load | codecs | gpu"
    )

    def add(name: str, help: str, description: str | None = None) -> argparse.ArgumentParser:
        section = commands.add_parser(name, help=help, description=description)
        section.add_argument("--dry", action="store_true", help="the same code with tiny models, on the simulated card")
        section.add_argument("--out", type=_path, help="results' folder; else bench/results, or if dry a temporary one")
        return section

    stream = add(
        "stream",
        "the streaming engine against the bound",
        "First, without a card, the steps of transformers of the published sizes, as the solver predicts them: "
        "stream.json. Then a model's steps as measured on the device.",
    )
    stream.add_argument(
        "--models",
        type=_words,
        help="published models, separated by commas, such as FLUX.1-dev; none for no such",
    )
    peers = add(
        "peers",
        "Ballast against other ways to offload",
        "Runs each rival with each setting in a process of its own, on the same model and inputs. None of them is a "
        "dependency: those are taken that this Python can import, and those in a folder made by `pip install --target "
        "DIR --no-deps NAME ...`; the others are listed.",
    )
    peers.add_argument(
        "--only", type=_words, help="names from the table, separated by commas, such as resident,ballast,cache-dit"
    )
    peers.add_argument("--shares", type=_shares, default="0,0.25,0.5,0.75", help="resident, for those with a budget")
    peers.add_argument("--ratio", type=float, default=0.5, help="seconds of computing for each second of copying")
    peers.add_argument("--rivals", type=_folder, help="folder with further packages")
    peers.add_argument("--timeout", type=float, default=300, help="seconds that one rival may take")
    for section in (stream, peers):
        section.add_argument("--device", default="auto", help=_DEVICE)
        section.add_argument("--size", default="tiny", choices=SIZES, help=_SIZE_HELP)
    add("caches", "step caches on the demo: how near the pictures are, and how much faster on the simulated clock")
    add("plans", "how long plans of full-size models take, and how much RAM")
    newbie = add(
        "newbie",
        "NewBie-image-Exp0.1: the rows of an article about its memory, and ours in 8, 6 and 4 GB",
        "On a GPU each row is measured, with random weights that take 16 GB of disk until it ends. Without one, or with"
        " --device cpu, the planner predicts.",
    )
    newbie.add_argument("--steps", type=int, default=6, help="of each row; the first does not count")
    load = add(
        "load",
        "reading weights from a cold disk to RAM, against transformers",
        "Writes a T5 encoder of random weights, and reads it in turns: as Ballast does, and by from_pretrained of "
        "transformers, mapped and copied to RAM. Each time in a new process, with nothing of it in the page cache.",
    )
    load.add_argument("--gb", type=float, default=2, help="GB of weights; as many of disk until it ends")
    load.add_argument("--rounds", type=int, default=5, help="how often each way is taken")
    load.add_argument("--folder", type=_folder, help="where the file goes, on the disk to measure; else temporary")
    codecs = add(
        "codecs",
        "encoding weights, and decoding them on the device",
        "Encodes a weight by each codec on the CPU, and decodes it on the device: the bits must be those that the CPU "
        "decodes.",
    )
    codecs.add_argument("--megaweights", type=float, default=38, help="million values of the weight")
    codecs.add_argument("--rounds", type=int, default=5, help="how often each is done; the median counts")
    for section in (newbie, codecs):
        section.add_argument("--device", default="auto", help=_OWN_DEVICE)
    gpu = add(
        "gpu",
        "all figures of one CUDA card, within 9 minutes",
        "Each section is a process of its own with its share of the time; what breaks or has no time says so in one "
        "line. Models have random weights: nothing is downloaded.",
    )
    gpu.add_argument("--seconds", type=float, default=530, help="that all sections may take")
    gpu.add_argument("--only", type=_words, help="sections, separated by commas, such as newbie,decode")
    return parser


def _words(text: str) -> list[str]:
    return text.split(",")


def _shares(text: str) -> list[float]:
    return [float(share) for share in text.split(",")]


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # here, as `memory` imports torch, which a bare machine may lack


def _folder(text: str) -> str:
    return str(_path(text).resolve())
