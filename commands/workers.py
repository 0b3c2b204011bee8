"""Run a batch on Ray: a pipeline on each card of a cluster, whose workers share what the text encoders make.

Ray places the workers, starts one that died again, and gives it its work once more.
"""

from __future__ import annotations

import functools
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .request import Request

if TYPE_CHECKING:
    import torch

    from ..pipelines.stages.batch_runs import Made
    from ..pipelines.stock.sound import Sound

_RETRIES = 2  # of work whose worker died
_MOST = 8  # requests at once: models come once for all of them
_SHARES = 4  # of the requests for each worker, at least, for all to end together
_ROUND = 32  # requests for each worker whose embeddings wait at once
_SIMULATED = 2  # workers where there is no card to count
_LOOK_SECONDS = 0.5  # between two looks at the steps of the workers
_TOLD = "told"  # calls that are answered while a worker runs
LOCAL = "local"


_Part = list[tuple[int, Any]]  # numbers of requests, with references to their conditionings


@dataclass(frozen=True)
class Drawn:
    """Pictures as arrays, with their sound; or why there are none, and the latents if only they could not be decoded.

    Latents are a tensor, which keeps what is noted on it.
    """

    images: Any = None
    wrong: str = ""
    latents: torch.Tensor | None = None
    sound: Sound | None = None


class Worker:
    """A pipeline on one card. Ray runs it in a process of its own."""

    def __init__(self, opening: Mapping[str, Any], sim_bytes: str | None) -> None:
        from ..memory import simulated
        from ..pipelines import open_pipeline

        if sim_bytes is not None:
            simulated.enable(total=sim_bytes)
        self.pipe = open_pipeline(**opening)
        self._now = 0, 0, 0

    def about(self) -> tuple[str, str]:
        """Return the machine, and its card."""
        return platform.node(), str(self.pipe.manager.device)

    def encode(self, requests: Sequence[Request]) -> Any:
        """Return the conditionings of requests, or in words why there is none.

        Of one request that alone, as Ray wants it.
        """
        found = self.pipe.encode_items([request.item(self.pipe.edits) for request in requests])
        told = [_in_a_line(each) if isinstance(each, Exception) else each for each in found]
        return told if len(told) > 1 else told[0]

    def run(self, requests: Sequence[Request], *conds: Any) -> tuple[list[Drawn], float, int]:
        """Return the outcome of each request, the seconds that all took, and the peak in bytes."""
        began = time.monotonic()
        self._now = 0, 0, 0
        found = [Drawn(wrong=each if isinstance(each, str) else "") for each in conds]
        latents: dict[int, Any] = {}
        places = [place for place, each in enumerate(conds) if not isinstance(each, str)]
        items = [requests[place].item(self.pipe.edits, functools.partial(self._stepped, place)) for place in places]
        for made in self.pipe.run_items(items, latents, dict(enumerate(conds[place] for place in places))):
            if made.error is not None:
                left = latents.get(made.number)
                found[places[made.number]] = Drawn(wrong=_in_a_line(made.error), latents=left)
            elif made.images is not None:
                found[places[made.number]] = Drawn(made.images.numpy(), sound=made.sound)
        peak = max((stage.peak_bytes for stage in self.pipe.manager.timeline.stages), default=0)
        return found, time.monotonic() - began, peak

    def seen(self) -> tuple[int, int, int]:
        """Which of the requests is drawn, the step that is done, and how many there are: 0 before the first."""
        return self._now

    def _stepped(self, place: int, step: int, steps: int, _: object) -> None:
        self._now = place, step, steps


@dataclass
class Share:
    """The work that one worker has done."""

    machine: str
    card: str
    items: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    step: str = ""  # that is done of what it draws now


class Cluster:
    """The workers of a batch, on the cluster at `address`, or on this machine. To be closed."""

    def __init__(self, opening: Mapping[str, Any], address: str, workers: int | None, sim_bytes: str | None) -> None:
        self.ray = _ray()
        self._began = not self.ray.is_initialized()
        if self._began:
            own = {"include_dashboard": False} if address == LOCAL else {}
            self.ray.init(address, log_to_driver=False, logging_level="ERROR", **own)
        try:
            cards = int(self.ray.cluster_resources().get("GPU", 0))
            runs_on_cards = str(opening["device"]).split(":")[0] not in ("cpu", "sim")
            if runs_on_cards and not cards:
                raise ValueError("Ray knows of no GPU. Use --device sim to try it, or start Ray on machines with one.")
            count = workers or (cards if runs_on_cards else _SIMULATED)
            needs = {"num_gpus": int(runs_on_cards), "num_cpus": 0 if runs_on_cards else 1}
            lives = {"max_restarts": -1, "max_task_retries": _RETRIES, "concurrency_groups": {_TOLD: 1}}
            actor = self.ray.remote(**needs, **lives)(Worker)
            self._workers = [actor.remote(dict(opening), sim_bytes) for _ in range(count)]
            self.shares = [Share(*about) for about in self._asked([each.about.remote() for each in self._workers])]
        except BaseException:
            self.close()
            raise

    def run(
        self,
        requests: Sequence[Request],
        edits: bool,
        stepped: Callable[..., None] = lambda *_: None,
        latents: MutableMapping[int, Any] | None = None,
    ) -> Iterator[Made]:
        """Yield what becomes of requests, as they are done: their pictures, or why there are none.

        `stepped` is called now and then with a request's number, the step that is done, and how many there are.
        `latents` get what is sampled, and could not be decoded.
        """
        import torch

        from ..pipelines.stages.batch_runs import Made

        size = max(1, min(_MOST, len(requests) // (_SHARES * len(self._workers))))
        ahead = iter(range(0, len(requests), _ROUND * len(self._workers)))
        parts: deque[_Part] = deque()
        idle = list(range(len(self._workers)))
        running: dict[Any, tuple[int, _Part]] = {}
        while True:
            if idle and not parts and (begin := next(ahead, None)) is not None:
                parts += self._encoded(requests, begin, begin + _ROUND * len(self._workers), size, edits)
            while idle and parts:
                who, part = idle.pop(), parts.popleft()
                given = [requests[number].carried() for number, _ in part]
                task = self._workers[who].run.remote(given, *(cond for _, cond in part))
                running[task] = who, part
            if not running:
                return
            ended, _ = self.ray.wait(list(running), num_returns=1, timeout=_LOOK_SECONDS)
            if not ended:
                self._look(running.values(), stepped)
                continue
            who, part = running.pop(task := ended[0])
            self.shares[who].step = ""
            idle.append(who)
            try:
                found, seconds, peak = self.ray.get(task)
            except self.ray.exceptions.RayError as error:
                if len(part) > 1:  # one of them may be what ends workers
                    parts.extendleft([each] for each in reversed(part))
                else:
                    yield Made(part[0][0], "decode", error=RuntimeError(f"its worker died: {_in_a_line(error)[:300]}"))
                continue
            share = self.shares[who]
            share.items += len(part)
            share.seconds += seconds
            share.peak_bytes = max(share.peak_bytes, peak)
            for (number, _), drawn in zip(part, found, strict=True):
                if latents is not None and drawn.latents is not None:
                    latents[number] = drawn.latents
                made = None if drawn.images is None else torch.from_numpy(drawn.images.copy())
                yield Made(number, "decode", made, RuntimeError(drawn.wrong) if drawn.wrong else None, drawn.sound)

    def _look(self, running: Iterable[tuple[int, _Part]], stepped: Callable[..., None]) -> None:
        """Ask the workers for their steps. One that does not answer soon is asked the next time again."""
        asked = {
            self._workers[who].seen.options(concurrency_group=_TOLD).remote(): (who, part) for who, part in running
        }
        told, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_SECONDS)
        for each in told:
            who, part = asked[each]
            with suppress(self.ray.exceptions.RayError):  # of one that died, whose work says so
                place, step, steps = self.ray.get(each)
                if steps:
                    self.shares[who].step = f"{step}/{steps}"
                    stepped(part[place][0], step, steps, None)

    def _encoded(self, requests: Sequence[Request], begin: int, end: int, size: int, edits: bool) -> Iterator[_Part]:
        """Encode the prompts of some requests, each once. Yield their conditionings, `size` requests at a time."""
        numbers = range(begin, min(end, len(requests)))
        texts = {number: requests[number].text(edits) for number in numbers}
        first = {texts[number]: requests[number] for number in reversed(numbers)}
        share = -(-len(first) // len(self._workers))
        conds: dict[Any, Any] = {}
        for who, at in enumerate(range(0, len(first), share)):
            some = list(first)[at : at + share]
            encode = self._workers[who].encode.options(num_returns=len(some))
            made = encode.remote([first[text].carried() for text in some])
            conds |= dict(zip(some, [made] if len(some) == 1 else made, strict=True))
        for at in range(0, len(numbers), size):
            yield [(number, conds[texts[number]]) for number in numbers[at : at + size]]

    def _asked(self, tasks: Sequence[Any]) -> list[Any]:
        try:
            return self.ray.get(list(tasks))
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise ValueError(f"a worker cannot open the model: {_in_a_line(cause)[:300]}") from None

    def table(self) -> str:
        """Return what each worker has done: requests, how fast, and the peak of its card.

        And the step that it is at.
        """
        from ..memory.charts.text_tables import format_table
        from ..memory.sizes import format_bytes

        rows: list[tuple[str, ...]] = [("worker", "machine", "card", "lines", "a minute", "peak VRAM", "step")]
        for number, share in enumerate(self.shares, 1):
            pace = f"{60 * share.items / share.seconds:.1f}" if share.seconds else "-"
            peak = format_bytes(share.peak_bytes)
            rows.append((str(number), share.machine, share.card, str(share.items), pace, peak, share.step or "-"))
        return format_table(rows)

    def close(self) -> None:
        """End the workers, and Ray if it was begun here."""
        if self._began:  # which ends them, and says nothing of what they were at
            self.ray.shutdown()
            return
        for worker in getattr(self, "_workers", ()):
            self.ray.kill(worker)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError('--ray needs Ray: run pip install -e ".[ray]" in Ballast\'s folder.') from error
    return ray


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
