"""`ballast generate --cards`: a process for each card of this machine, which draw one picture together.

Under torchrun there are processes already, on one machine or several.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .streams import escape_unprintable

if TYPE_CHECKING:
    from ..pipelines import Pipeline
    from ..pipelines.encoding.conditioning import Conditioning

_PATIENCE = timedelta(hours=12)  # of processes that wait for the first one's encoders; when one ends, all do
_GRACE_SECONDS = 5

Run = Callable[[argparse.Namespace], int]


def check(cards: int, device: str) -> None:
    """Raise ValueError, in one line, for more cards than this machine has."""
    import torch

    if cards < 1:
        raise ValueError(f"--cards is {cards}; it takes at least 1.")
    kind, _, number = device.partition(":")
    if cards > 1 and number:
        raise ValueError(f"--device is {device}, and --cards wants {cards}. Name no card: --device {kind}.")
    if cards > 1 and kind in ("auto", "cuda") and torch.cuda.is_available():
        here = int(os.environ.get("LOCAL_WORLD_SIZE", cards))
        if (count := torch.cuda.device_count()) < here:
            raise ValueError(f"--cards wants {here} cards of this machine, which has {count}.")
    elif cards > 1 and kind not in ("auto", "cpu", "sim"):
        raise ValueError(f"--cards goes with cuda, cpu and sim, not {kind}.")


def launched() -> bool:
    """Return whether this is one of several processes that draw a picture: here, or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(cards: int, run: Run, arguments: argparse.Namespace) -> int:
    """Start a process for each card to `run`. Return the exit status. Raises RuntimeError with the first failure.

    Ends all when one does, or this one is interrupted.
    """
    import torch.multiprocessing as processes

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells whom it ends
    told = processes.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="ballast_cards_") as folder:
        given = (cards, str(Path(folder) / "meeting"), told, run, arguments)
        group = processes.start_processes(_process, given, cards, join=False, start_method="spawn")
        try:
            while not group.join(grace_period=_GRACE_SECONDS):
                pass
        except (processes.ProcessExitedException, processes.ProcessRaisedException) as error:
            # Who is killed says nothing, and the others only that a connection is lost.
            ended = getattr(error, "signal_name", None) or told.empty()
            raise RuntimeError(f"one of {cards} processes was ended: {error}" if ended else told.get()) from None
        finally:  # an interrupt
            for process in group.processes:
                process.join(_GRACE_SECONDS if sys.exc_info()[0] else None)
                if process.is_alive():
                    process.kill()
                    process.join()
    return 0


def _process(rank: int, cards: int, meeting: str, told: Any, run: Run, arguments: argparse.Namespace) -> None:
    """One of the processes of `launch`. Only the first says anything."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": cards, "LOCAL_WORLD_SIZE": cards}
    os.environ |= {name: str(value) for name, value in places.items()}
    os.environ["BALLAST_MEETING"] = meeting
    escape_unprintable()
    try:
        with open(os.devnull, "w", encoding="utf-8", errors="replace") as nothing, contextlib.ExitStack() as exits:
            if rank:
                exits.enter_context(contextlib.redirect_stdout(nothing))
                exits.enter_context(contextlib.redirect_stderr(nothing))
            status = run(arguments)
    except Exception as error:
        told.put(" ".join(str(error).split()) or type(error).__name__)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.stdout.flush()
    sys.exit(status)


@contextlib.contextmanager
def group(cards: int, device: str, ram: str | None) -> Iterator[tuple[str, str | int | None]]:
    """Be one of so many processes, until the block ends. Gives its device, and an even share of its machine's RAM."""
    import torch
    from torch import distributed

    from ..memory.memory_manager import manager
    from ..memory.sizes import parse_bytes

    if cards == 1:
        yield device, ram
        return
    rank, local, here = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), _here()
    has_cards = device in ("auto", "cuda") and torch.cuda.is_available()
    if has_cards:
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    else:  # they share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
    meeting = os.environ.get("BALLAST_MEETING")
    place: dict[str, Any] = {"world_size": cards, "rank": rank}
    if meeting:
        place["store"] = distributed.FileStore(meeting, cards)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if has_cards else "gloo", timeout=_PATIENCE, **place)
    try:
        whole = manager(device).ram_budget_bytes if ram is None else parse_bytes(ram)
        yield device, whole // here
    finally:
        distributed.destroy_process_group()


def _here() -> int:
    """Return how many of the processes are on this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def sampler(pipe: Pipeline, cards: int, processes: int | None = None) -> Pipeline:
    """Return the pipeline with the RAM budget to sample within, where a machine's processes read the same files.

    `pipe` has an even share of what there is for so many, by default those that are here.
    """
    from ..memory.planning.fit import sizes_of
    from ..memory.planning.planner import window_bytes
    from ..memory.shared_cards import ram_share
    from ..memory.weights import direct

    count = processes or _here()
    if cards == 1 or pipe.ram_bytes is None or any(unit.source() is None for unit in pipe.denoisers):
        return pipe
    weights_bytes = sum(unit.size_bytes for unit in pipe.denoisers)
    if processes is None and count * pipe.ram_bytes >= weights_bytes:
        direct.share_cache()
    least_bytes = 2 * max(window_bytes(sizes_of(unit), "streamed") for unit in pipe.denoisers)
    own_bytes = ram_share(count * pipe.ram_bytes, weights_bytes, least_bytes, count)
    return pipe.within(pipe.vram_bytes, own_bytes, pipe.keep)


def is_first(cards: int) -> bool:
    """Return whether this process decodes and writes: the only one, or the first of several."""
    return cards == 1 or os.environ.get("RANK", "0") == "0"


def encoded_once(cards: int, encode: Callable[[], Conditioning]) -> Conditioning:
    """Return what `encode` gives.

    Of several processes the first runs the encoders, and the others find it in the cache.
    """
    import torch

    if cards == 1:
        return encode()
    turn = torch.zeros(1)
    if is_first(cards):
        found = encode()
        torch.distributed.broadcast(turn, 0)
        return found
    torch.distributed.broadcast(turn, 0)
    return encode()
