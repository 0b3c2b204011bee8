"""`ballast bench`: measures how fast models stream."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options, which the benchmarks themselves read."""
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark. Raises RuntimeError where this install has none."""
    try:
        from .. import bench
    except ImportError as error:
        raise RuntimeError("bench is not part of this install. Clone the repository and run it from there.") from error
    return bench.main(arguments.rest)
