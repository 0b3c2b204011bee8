"""Measures: the streaming engine against the bound, and Ballast against its peers. Not part of what ComfyUI installs.

`main` is what `ballast bench` hands its arguments to. The figures go to a JSON file and a picture of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..memory.files import check_folder, expanded
from .places import RESULTS

SIZES = ("tiny", "tiny-newbie", "tiny-hidream", "newbie", "hidream")


def main(argv: Sequence[str]) -> int:
    """Run `stream`, `peers`, `plans`, `newbie`, `load`, `codecs` or `gpu`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="ballast bench", description="Measure how fast models stream.")
    commands = parser.add_subparsers(required=True, metavar="stream | peers | plans | newbie | load | codecs | gpu")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", default="auto", help="auto (a GPU, else sim), sim, cuda, or cpu")
    shared.add_argument(
        "--size",
        default="tiny",
        choices=SIZES,
        help="tiny: some MB; newbie: 7 GB; hidream: 34 GB; tiny-newbie, tiny-hidream: small ones of the same classes",
    )
    _add_out(shared)

    stream = commands.add_parser(
        "stream",
        parents=[shared],
        help="the streaming engine against the bound",
        description="First, without a card, the steps of transformers of the published sizes, as the solver predicts "
        "them: stream.json. Then a model's steps as measured on the device.",
    )
    stream.add_argument(
        "--models", help="names of published models, separated by commas, such as FLUX.1-dev; none for no such"
    )
    stream.set_defaults(run=_stream)

    peers = commands.add_parser(
        "peers",
        parents=[shared],
        help="Ballast against other ways to offload",
        description="Runs each rival with each setting in a process of its own, on the same model and inputs. None of "
        "them is a dependency: those are taken that this Python can import, and those in a folder made by "
        "`pip install --target DIR --no-deps NAME ...`; the others are listed with their error.",
    )
    peers.add_argument("--only", help="names from the table, separated by commas, such as resident,ballast,cache-dit")
    peers.add_argument("--shares", default="0,0.25,0.5,0.75", help="resident shares, for those that take a budget")
    peers.add_argument("--ratio", type=float, default=0.5, help="seconds of computing for each second of copying")
    peers.add_argument("--rivals", type=expanded, help="folder with further packages")
    peers.add_argument("--timeout", type=float, default=300, help="seconds that one rival may take")
    peers.set_defaults(run=_peers)

    plans = commands.add_parser("plans", help="how long plans of full-size models take, and how much RAM")
    plans.set_defaults(run=_plans)

    newbie = commands.add_parser(
        "newbie",
        help="NewBie-image-Exp0.1: the rows of an article about its memory, and ours in 8, 6 and 4 GB",
        description="On a GPU each row is measured, with random weights that take 16 GB of disk until it ends. Without "
        "one, or with --device cpu, the planner predicts.",
    )
    newbie.add_argument(
        "--device", default="auto", help="auto (a GPU, else cpu), cuda, or cpu: predicted, not measured"
    )
    newbie.add_argument("--steps", type=int, default=6, help="of each row; the first does not count")
    _add_out(newbie)
    newbie.set_defaults(run=_newbie)

    load = commands.add_parser(
        "load",
        help="reading weights from a cold disk to RAM, against transformers",
        description="Writes a T5 encoder of random weights, and reads it in turns: as Ballast does, and by "
        "from_pretrained of transformers, mapped and copied to RAM. Each time in a new process, with nothing of the "
        "file in the page cache.",
    )
    load.add_argument("--gb", type=float, default=2, help="GB of weights; as many of disk until it ends")
    load.add_argument("--rounds", type=int, default=5, help="how often each way is taken")
    load.add_argument(
        "--folder", type=expanded, help="where the file goes, on the disk to measure; else a temporary one"
    )
    _add_out(load)
    load.set_defaults(run=_load)

    codecs = commands.add_parser(
        "codecs",
        help="encoding weights, and decoding them on the device",
        description="Encodes a weight by each codec on the CPU, and decodes it on the device: the bits must be those "
        "that the CPU decodes.",
    )
    codecs.add_argument("--device", default="auto", help="auto (a GPU, else cpu), cuda, or cpu")
    codecs.add_argument("--megaweights", type=float, default=38, help="million values of the weight")
    codecs.add_argument("--rounds", type=int, default=5, help="how often each is done; the median counts")
    _add_out(codecs)
    codecs.set_defaults(run=_codecs)

    gpu = commands.add_parser(
        "gpu",
        help="all figures of one CUDA card, within 9 minutes",
        description="Each section is a process of its own with its share of the time; what breaks or has no time says "
        "so in one line. Models have random weights: nothing is downloaded.",
    )
    gpu.add_argument("--dry", action="store_true", help="the same code on the simulated card, with tiny models")
    gpu.add_argument("--seconds", type=float, default=530, help="that all sections may take")
    gpu.add_argument("--only", help="sections, separated by commas, such as newbie,decode")
    gpu.add_argument(
        "--out", type=expanded, help="folder for the results; else bench/results, or a temporary one if dry"
    )
    gpu.set_defaults(run=_gpu)
    arguments = parser.parse_args(argv)
    if getattr(arguments, "out", None):
        check_folder(arguments.out)
    return arguments.run(arguments)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=expanded, default=RESULTS, help="folder for the .json and the .png")


def _stream(arguments: argparse.Namespace) -> int:
    from . import published, stream

    names = published.MODELS if arguments.models is None else arguments.models.split(",")
    if arguments.models != "none":
        published.run(arguments.out, list(names))
    return stream.run(arguments.device, arguments.size, arguments.out)


def _plans(arguments: argparse.Namespace) -> int:
    from .plans import run

    return run()


def _newbie(arguments: argparse.Namespace) -> int:
    from .newbie import run

    return run(arguments.device, arguments.out, arguments.steps)


def _load(arguments: argparse.Namespace) -> int:
    from .load import run

    return run(arguments.gb, arguments.rounds, arguments.folder, arguments.out)


def _codecs(arguments: argparse.Namespace) -> int:
    from .codecs import run

    return run(arguments.device, arguments.megaweights, arguments.rounds, arguments.out)


def _gpu(arguments: argparse.Namespace) -> int:
    from .gpu import run

    only = arguments.only.split(",") if arguments.only else None
    return run(arguments.dry, arguments.seconds, only, arguments.out)


def _peers(arguments: argparse.Namespace) -> int:
    from .peers import run

    only = arguments.only.split(",") if arguments.only else None
    shares = [float(share) for share in arguments.shares.split(",")]
    return run(
        arguments.device, arguments.size, arguments.out, only, shares, arguments.ratio, arguments.rivals,
        arguments.timeout,
    )  # fmt: skip
