"""`ballast demo | generate | batch | plan | convert | doctor | bench`: the parser, and errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import batch, bench, convert, demo, generate, plan
from .streams import escape_unprintable


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 for success, 1 for an error, which is printed in one line."""
    escape_unprintable()
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
    names = "demo | generate | batch | plan | convert | doctor | bench"
    commands = parser.add_subparsers(required=True, metavar=names)

    drawing = commands.add_parser("demo", help="draw a picture with the bundled model")
    demo.add_arguments(drawing)
    drawing.set_defaults(run=demo.run)

    running = commands.add_parser("generate", help="run a diffusers pipeline folder")
    generate.add_arguments(running)
    running.set_defaults(run=generate.run)

    running_many = commands.add_parser("batch", help="run a list of prompts, each model loaded once for all of them")
    batch.add_arguments(running_many)
    running_many.set_defaults(run=batch.run)

    planning = commands.add_parser("plan", help="say what a run would take, and why, without loading anything")
    plan.add_arguments(planning)
    planning.set_defaults(run=plan.run)

    converting = commands.add_parser(
        "convert", help="write a model's weights in 12 or 8 bits to a file, to be run from"
    )
    convert.add_arguments(converting)
    converting.set_defaults(run=convert.run)

    examining = commands.add_parser("doctor", help="say what this machine has, and what is missing")
    examining.set_defaults(run=_doctor)

    measuring = commands.add_parser(
        "bench",
        help="measure how fast models stream",
        usage="ballast bench stream | peers | plans | newbie | load | codecs | gpu [-h] ...",
    )
    bench.add_arguments(measuring)
    measuring.set_defaults(run=bench.run)
    return parser


def _doctor(_: argparse.Namespace) -> int:
    from . import doctor  # late, since it imports torch

    return doctor.run()


if __name__ == "__main__":
    sys.exit(main())
