"""`ballast convert`: writes a model's weights in another form to a file, which runs like any other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack

from .arguments import MODEL_HELP, add_file_arguments, expanded, family_arguments, model_path, say_opening

FORMS = ("exact12", "int8", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", type=model_path, help=MODEL_HELP)
    parser.add_argument("out", type=expanded, help="the .safetensors file to write")
    parser.add_argument(
        "--to", required=True, choices=FORMS, help="exact12 (bf16 in 12 bits, without loss), or int8 or fp8 in 8 bits"
    )
    parser.add_argument("--part", default="transformer", help="such as text_encoder_2; by default transformer")
    parser.add_argument("--dtype", default="auto", help="auto, bf16, fp16 or fp32: what the weights are run in")
    add_file_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the file. Raises ValueError or OSError, in one line, for what cannot be converted or written."""
    from tqdm import tqdm

    from ..memory.codecs.converters import CONVERTERS
    from ..memory.files import check_file
    from ..memory.sizes import format_bytes
    from ..pipelines import open_pipeline

    out, model = arguments.out, arguments.model
    if out.suffix.lower() != ".safetensors":
        raise ValueError(f"cannot write {out}. Use a name that ends in .safetensors.")
    if model.exists() and out.resolve().is_relative_to(model.resolve()):
        raise ValueError(f"{out} is of the model itself, which stays as it is. Name a file elsewhere.")
    check_file(out)
    say_opening(model)
    pipe = open_pipeline(model, "cpu", dtype=arguments.dtype, **family_arguments(arguments))
    units = {unit.name: unit for unit in (*pipe.encoders, *pipe.denoisers)}
    if arguments.part not in units:
        raise ValueError(f"{model} has no {arguments.part!r} to convert. It has {', '.join(units)}.")
    unit = units[arguments.part]
    with ExitStack() as exits:

        def begin(plain_bytes: int, wanted_bytes: int) -> Callable[[int], None]:
            before, after = format_bytes(unit.size_bytes), format_bytes(wanted_bytes)
            print(f"converting {unit.name} to {arguments.to}: {before} to about {after}", file=sys.stderr, flush=True)
            bar = exits.enter_context(tqdm(desc="convert", total=plain_bytes, unit="B", unit_scale=True, leave=False))
            return lambda read: bar.update(read - bar.n)

        written = unit.write_converted(out, CONVERTERS[arguments.to], begin)
    print(f"wrote {out}, {format_bytes(written)}")
    return 0
