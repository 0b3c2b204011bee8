"""`ballast batch`: runs the lines of a file, stage by stage, and writes a picture or more for each."""

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import (
    LOCKSTEP_HELP,
    MODEL_HELP,
    ONCE_HELP,
    SCHEDULING,
    add_device_arguments,
    add_model_arguments,
    expanded,
    family_arguments,
    model_path,
    say_opening,
)
from .images import ANIMATIONS, PICTURES, check_film, frame_files
from .lines import Line, read_lines
from .request import FRAMES, Request
from .results import LatentFiles, Result

if TYPE_CHECKING:
    from ..pipelines import Pipeline
    from ..pipelines.stages.batch_runs import Made

_DEFAULTS = (
    "width", "height", "frames", "steps", "guidance", "true_cfg", "seed", "batch", "strategy", "compile", "attention",
    "once", "lockstep", "max_sequence_length", *SCHEDULING,
)  # fmt: skip
_PICTURES = ("image", "mask", "last_image", *FRAMES)  # files by their names in a line
_NOT_OF_A_LINE = ("self", "cond", "on_step", "noise", "cards")  # arguments of `sample` that no line can have
_NO_MATTER = "strategy", "once", "lockstep"  # the picture is the same
_PARTS = {"encode": 5, "sample": 90, "decode": 5}  # of the work of a line, for the bar
_WHOLE = sum(_PARTS.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_device_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "lines", type=expanded, help="a file with a prompt a line (.txt), or with arguments of its own (.jsonl, .csv)"
    )
    parser.add_argument("--model", type=model_path, required=True, help=MODEL_HELP)
    parser.add_argument("--out", type=expanded, required=True, help="the folder for the results")
    parser.add_argument("--format", help="png, jpg or webp; for videos webp, gif or mp4; by default png or webp")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run on all cards of a Ray cluster, such as auto; without an address on all cards of this machine",
    )
    parser.add_argument("--workers", type=int, help="with --ray, how many; by default one for each card")
    parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks")
    parser.add_argument("--attention", default="auto", help="one of diffusers' attention backends, such as sage")
    parser.add_argument("--once", action="store_true", help=ONCE_HELP)
    parser.add_argument("--lockstep", action="store_true", help=LOCKSTEP_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Run the lines that have no results yet. Returns 1 if one failed. Raises ValueError for bad options."""
    say_opening(arguments.model)
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    from ..memory import simulated
    from ..memory.files import check_folder
    from ..pipelines import open_pipeline
    from .generate import SIM_BYTES

    lines = read_lines(arguments.lines)
    if not lines:
        raise ValueError(f"{arguments.lines} has no lines. Write a prompt on each.")
    if arguments.workers is not None and (arguments.workers < 1 or not arguments.ray):
        raise ValueError(f"--workers is {arguments.workers}; it takes at least 1, and goes with --ray.")
    check_folder(arguments.out)
    if is_simulated := arguments.device.split(":")[0] == simulated.DEVICE_TYPE:
        simulated.enable(total=arguments.vram or SIM_BYTES)
    transformers_logging.disable_progress_bar()
    diffusers_logging.disable_progress_bar()
    opening = {name: getattr(arguments, name) for name in ("device", "vram", "ram", "dtype")}
    opening |= {"path": arguments.model, **family_arguments(arguments)}
    pipe = open_pipeline(**opening)
    jobs, failed = _jobs(pipe, lines, arguments)
    done = [job for job in jobs if job.result.is_done]
    for job in done:
        job.result.forget_latents()
    unmade = _once([job for job in jobs if not job.result.is_done])
    if arguments.ray and unmade:
        from .workers import Cluster

        sim_bytes = (arguments.vram or SIM_BYTES) if is_simulated else None
        with closing(Cluster(opening, arguments.ray, arguments.workers, sim_bytes)) as cluster:
            kept = LatentFiles([job.result for job in unmade])
            running = functools.partial(cluster.run, [job.request for job in unmade], pipe.edits, latents=kept)
            made, more = _followed(pipe, unmade, running, cluster.table)
            print(cluster.table())
    else:
        made, more = _followed(pipe, unmade, functools.partial(_here, pipe, unmade))
    failed |= more
    there = f"; {len(done)} had results already" if done else ""
    print(f"wrote {made} of {len(lines)} lines to {arguments.out}{there}")
    for number in sorted(failed):
        print(f"ballast: line {number}: {failed[number]}", file=sys.stderr)
    return 1 if failed else 0


@dataclass(frozen=True)
class _Job:
    """Lines that are alike, to run once, and their result."""

    lines: tuple[int, ...]
    result: Result
    request: Request


def _jobs(pipe: Pipeline, lines: Sequence[Line], arguments: argparse.Namespace) -> tuple[list[_Job], dict[int, str]]:
    """Return what the lines ask for, and what is wrong with the others, by their numbers."""
    suffix = f".{arguments.format or ('webp' if pipe.is_video else 'png')}".lower()
    if suffix not in (ANIMATIONS if pipe.is_video else PICTURES):
        kinds = "webp, gif, mp4" if pipe.is_video else "png, jpg, webp"
        raise ValueError(f"cannot write {arguments.format} of {pipe.title}. Use {kinds}.")
    check_film(suffix)
    usual = {name: value for name in _DEFAULTS if (value := getattr(arguments, name)) is not None}
    facts = {"model": pipe.title, "model_digest": pipe.digest()}
    jobs, wrong = [], {line.number: line.wrong for line in lines if line.wrong}
    for line in lines:
        if line.wrong:
            continue
        try:
            jobs.append(_job(pipe, line, {"negative_prompt": arguments.negative, **usual}, facts, arguments, suffix))
        except (ValueError, TypeError, OSError) as error:
            wrong[line.number] = _in_a_line(error)
    return jobs, wrong


def _job(
    pipe: Pipeline,
    line: Line,
    usual: Mapping[str, Any],
    facts: Mapping[str, Any],
    arguments: argparse.Namespace,
    suffix: str,
) -> _Job:
    if refused := sorted(set(line.given) & set(_NOT_OF_A_LINE)):
        raise ValueError(f"it gives {', '.join(refused)}, which a line of a list cannot. Leave it out.")
    given = {**usual, **line.given}
    prompt, negative = given.pop("prompt"), given.pop("negative_prompt")
    files = {name: _paths(given.pop(name), arguments.lines.parent, name) for name in _PICTURES if name in given}
    known = inspect.signature(pipe.sample).parameters
    texts = {name for name in given if name not in known and pipe.encodes_with(name)}
    encoding = {name: given.pop(name) for name in sorted(texts)}
    digests = {name: [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] for name, paths in files.items()}
    settings = {**given, **encoding, **digests, **facts, "prompt": prompt, "negative_prompt": negative}
    settings = {name: value for name, value in settings.items() if name not in _NO_MATTER}
    batch = given.get("batch")
    count = batch if type(batch) is int and 1 <= batch <= 64 else 1  # another number `sample` refuses
    result = Result(arguments.out, suffix, settings, count)

    return _Job((line.number,), result, Request(prompt, negative, encoding, given, files))


def _once(jobs: Sequence[_Job]) -> list[_Job]:
    """Each result once, with all lines that ask for it."""
    found: dict[Path, _Job] = {}
    for job in jobs:
        first = found.setdefault(path := job.result.paths[0], job)
        if first is not job:
            found[path] = replace(first, lines=first.lines + job.lines)
    return list(found.values())


def _paths(given: Any, folder: Path, name: str) -> list[Path]:
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"it names the picture {str(given)[:80]!r}. Write the path of a file, from the list's folder.")
    paths = [folder / expanded(name) for name in names]
    if name in FRAMES:
        paths = [file for path in paths for file in frame_files(path)]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"there is no file {path}. Put it there, or name another.")
    return paths


def _here(pipe: Pipeline, jobs: Sequence[_Job], stepped: Callable[..., None]) -> Iterator[Made]:
    """Run jobs on this machine."""
    steps = [functools.partial(stepped, number) for number in range(len(jobs))]
    items = [job.request.item(pipe.edits, step) for job, step in zip(jobs, steps, strict=True)]
    return pipe.run_items(items, LatentFiles([job.result for job in jobs]))


def _followed(
    pipe: Pipeline,
    jobs: Sequence[_Job],
    running: Callable[[Callable[..., None]], Iterator[Made]],
    beneath: Callable[[], str] = str,
) -> tuple[int, dict[int, str]]:
    """Run jobs and write their results. Returns how many were written, and why the others were not, by line.

    `running` is given what is to be called after each step: with the job's number, the step, and how many there are.
    `beneath` the bar there is a text.
    """
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    console = Console(stderr=True)

    class Bar(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if text := beneath() if console.is_terminal and not self.finished else "":
                yield Text(text)

    failed: dict[int, str] = {}
    written = 0
    if not jobs:
        return written, failed
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
    with Bar(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=_WHOLE * len(jobs))
        done = [0.0] * len(jobs)
        count = sum(len(job.lines) for job in jobs)

        def moved(number: int, parts: float, stage: str) -> None:
            done[number] = parts
            bar.update(task, completed=sum(done), description=f"{stage} {written + len(failed)}/{count}")

        def stepped(number: int, step: int, steps: int, _: object) -> None:
            moved(number, _PARTS["encode"] + _PARTS["sample"] * step / steps, "sample")

        for made in running(stepped):
            job, parts = jobs[made.number], list(_PARTS)
            if made.error is not None:
                why = _in_a_line(made.error)
                if made.stage == "decode" and job.result.latents.is_file():
                    why += f" The latent is not lost: it is in {job.result.latents}."
                failed |= dict.fromkeys(job.lines, why)
            elif made.images is not None:
                job.result.write(made.images, pipe.frame_rate, made.sound)
                written += len(job.lines)
            through = parts[: parts.index(made.stage) + 1] if made.error is None else parts
            moved(made.number, sum(_PARTS[part] for part in through), made.stage)
    return written, failed


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
