"""`ballast plan`: predicts what a run needs, for one budget or several. Loads nothing."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import cards
from .arguments import (
    LOCKSTEP_HELP,
    MODEL_HELP,
    ONCE_HELP,
    add_model_arguments,
    add_picture_arguments,
    add_step_range_arguments,
    expanded,
    family_arguments,
    model_path,
    sampling_arguments,
    text_arguments,
)
from .images import PICTURES, opened_pictures, save_picture

if TYPE_CHECKING:
    from ..memory.planning.runplan import RunPlan
    from ..memory.rates import Rates

_SIZE = 1200, 420  # of the picture of one budget among several


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model_arguments(parser)
    add_step_range_arguments(parser)
    parser.add_argument("model", type=model_path, nargs="?", help=MODEL_HELP)
    add_picture_arguments(parser)
    parser.add_argument("--prompt", help="what will be encoded; by default a prompt of usual length")
    parser.add_argument("--vram", help="budgets such as 8GB,12GB,24GB, 0 for all that is free; needed without a GPU")
    parser.add_argument("--ram", help="budget for weights in RAM, such as 24GB")
    parser.add_argument("--strategy", default="auto", help="auto, resident, streamed or leafwise (with the least VRAM)")
    parser.add_argument("--once", action="store_true", help=ONCE_HELP)
    parser.add_argument("--lockstep", action="store_true", help=LOCKSTEP_HELP)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu, mps or sim")
    parser.add_argument("--cards", type=int, default=1, help="draw each picture on so many cards of one machine")
    parser.add_argument("--h2d-gbps", type=float, help="GB/s to the device, in place of this machine's")
    parser.add_argument("--disk-gbps", type=float, help="GB/s from disk, in place of this machine's")
    parser.add_argument("--tflops", type=float, help="TFLOPS of products and attention, in place of this machine's")
    parser.add_argument(
        "--compare-weights", action="store_true", help="also say what each choice of --weights would take and gain"
    )
    parser.add_argument(
        "--table",
        nargs="*",
        metavar="NAME",
        help="in a checkout: plan these published models, or all, for common PCs, and write docs/will-it-run.md",
    )
    parser.add_argument("--out", type=expanded, help="also draw predicted VRAM over time to this .png")


def run(arguments: argparse.Namespace) -> int:
    """Make the plans, print them, and draw the picture if one is wanted. Raises ValueError for bad options."""
    if arguments.table is not None:
        if arguments.model:
            raise ValueError("--table plans published models. Leave the model out.")
        from . import plan_table  # late: only a checkout has what it needs

        plan_table.write(arguments.table)
        return 0
    if arguments.model is None:
        raise ValueError("there is no model. Name its folder, or the file of its transformer, or demo.")
    from ..memory.files import check_file
    from ..memory.planning.runplan import compare
    from ..pipelines.planning.choices import CHOICES, compare_weights
    from ..pipelines.planning.forecasts import quietly

    if arguments.out:
        if arguments.out.suffix.lower() not in PICTURES:
            raise ValueError(f"cannot write {arguments.out}. Use a name that ends in {', '.join(PICTURES)}.")
        check_file(arguments.out)
    for option in ("h2d_gbps", "disk_gbps", "tflops"):
        if (value := getattr(arguments, option)) is not None and not value > 0:
            raise ValueError(f"--{option.replace('_', '-')} is {value:g}; it takes a number above 0.")
    with quietly():
        plans = _plans(arguments)
        text = str(plans[0]) if len(plans) == 1 else compare(plans)
        if arguments.compare_weights:
            chosen = {choice: _plans(arguments, choice) for choice in CHOICES}
            tables = (
                compare_weights(dict(zip(chosen, each, strict=True))) for each in zip(*chosen.values(), strict=True)
            )
            text = "\n\n".join([text, *tables])
    if arguments.out:
        _draw(plans, arguments.out)
        text += f"\n\nwrote {arguments.out}"
    print(text)
    return 0


def _plans(arguments: argparse.Namespace, weights: str = "") -> list[RunPlan]:
    """Return a plan for each budget, with the weights held as asked for, or in another way."""
    from ..memory.probe import rates as measured_rates
    from ..pipelines import open_pipeline
    from ..pipelines.planning.plans import NoBudgetError

    pipe = open_pipeline(
        arguments.model,
        arguments.device,
        ram=arguments.ram,
        dtype=arguments.dtype,
        **(family_arguments(arguments) | ({"weights": weights} if weights else {})),
    )
    names = ("width", "height", "frames", "steps", "guidance", "strategy", "batch", "cards", "once", "lockstep")
    asked = {name: getattr(arguments, name) for name in names}
    asked["negative_prompt"] = arguments.negative
    if arguments.cards > 1:
        share = pipe.within(ram=(pipe.ram_bytes or pipe.manager.ram_budget_bytes) // arguments.cards)
        asked["ram"] = cards.sampler(share, arguments.cards, arguments.cards).ram_bytes
    images, pictures = opened_pictures(arguments, pipe.edits)
    asked |= {"images": images, **pictures, **text_arguments(arguments), **sampling_arguments(arguments)}
    if arguments.prompt is not None:
        asked["prompt"] = arguments.prompt

    machine = measured_rates(pipe.manager.device, pipe.denoisers[0].disk)
    named = _named_rates(machine, arguments)
    rates = None if named == machine else named
    budgets = [budget.strip() for budget in (arguments.vram or "").split(",") if budget.strip()]
    try:
        return [pipe.plan(vram=vram, rates=rates, **asked) for vram in budgets or [None]]
    except NoBudgetError:
        raise NoBudgetError("--vram 8GB") from None


def _named_rates(machine: Rates, arguments: argparse.Namespace) -> Rates:
    """Replace the machine's rates by those that the options name."""
    rates = machine
    if arguments.h2d_gbps:
        to_device = arguments.h2d_gbps * 1e9
        paged = min(rates.paged_bytes_per_second, to_device)
        rates = replace(rates, pinned_bytes_per_second=to_device, paged_bytes_per_second=paged)
    if arguments.disk_gbps:
        rates = replace(rates, disk_bytes_per_second=arguments.disk_gbps * 1e9)
    if arguments.tflops:
        rates = replace(rates, operations_per_second=arguments.tflops * 1e12, attention=0.0)  # which is as fast
    return rates if rates == machine else replace(rates, source="assumed")


def _draw(plans: list[RunPlan], out: Path) -> None:
    from ..memory.planning.runplan import draw_plans

    picture = plans[0].picture() if len(plans) == 1 else draw_plans(plans, *_SIZE)
    save_picture(picture, out)
