"""Encode many prompts with each encoder loaded once, whatever the order of calls in one prompt.

Code of diffusers calls the encoders in turn for each prompt. So it runs once for each encoder: that one is really
called, and its answers are kept; those that were called before answer from what was kept, those to come with zeros of
the right shapes, which a dry run told. What an encoder is asked must not follow from another's answer; where it does,
the prompt is encoded by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ...memory.errors import is_out_of_memory, release_frames
from ...memory.host.flags import host_flags
from ...memory.planning.forecast import Forecast, UnitForecast
from ...memory.weights.interpose import Forward, interpose
from ..encoding.conditioning import Conditioning, to_host
from ..encoding.embedding_cache import cache_key
from ..encoding.prompts import Text, check_text
from ..options import plain_defaults
from ..planning.forecasts import quietly
from ..runner import Runner, Stage
from .encode import conditioning_of, embeddings_of, encode_text, encoding_key, encoding_of, kept

if TYPE_CHECKING:
    from ..models.model import Model, Modules

log = logging.getLogger("ballast")

_MOST = 256  # prompts at once


@dataclass(frozen=True)
class _Hollow:
    """A tensor of an answer that is not there yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass
class _Reading:
    """The encoders' calls for one text, and their answers, by their names and in the order of the calls."""

    text: Text
    forecast: Forecast
    hollow: dict[str, list[Any]]
    order: list[str]
    nbytes: int
    answers: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    conditioning: Conditioning | None = None
    alone: bool = False  # to be encoded by itself


@dataclass(frozen=True)
class PromptBatch:
    """Encodes many prompts with one model."""

    model: Model
    runner: Runner

    @plain_defaults()
    def encode(self, texts: Sequence[Text], most_bytes: int) -> list[Conditioning | Exception]:
        """Return the conditionings of the first texts, as many as `most_bytes` of RAM hold: at least one.

        For a text that cannot be encoded there is the error.
        """
        found: list[Conditioning | Exception | None] = []
        readings: dict[int, _Reading] = {}
        held = 0
        together = len(self.model.encoders) > 1 and not self.runner.manager.accelerator.is_cpu
        with self.runner.adapters(self.model.encoders):
            try:
                for text in texts[:_MOST]:
                    known = self._cached(text)
                    reading = self._reading(text) if together and known is None else None
                    takes = reading.nbytes if reading else known.nbytes if isinstance(known, Conditioning) else 0
                    if found and held + takes > most_bytes:
                        break
                    if reading:
                        readings[len(found)] = reading
                    found.append(known)
                    held += takes
                    if known is None and reading is None:  # its size is known when it is made
                        found[-1] = self._alone(text)
                        held += found[-1].nbytes if isinstance(found[-1], Conditioning) else 0
                self._read_together(list(readings.values()))
                for number, reading in readings.items():
                    found[number] = reading.conditioning or self._alone(reading.text)
            finally:
                self.runner.manager.end_stage(self.model.encoders, False)
        return [each for each in found if each is not None]

    def _cached(self, text: Text) -> Conditioning | Exception | None:
        try:
            check_text(text.prompt, text.negative_prompt)
            key = encoding_key(self.model, self.runner, text)
            return self.model.claims.cache.get(key) if key else None
        except Exception as error:
            release_frames(error)
            return error

    def _alone(self, text: Text) -> Conditioning | Exception:
        try:
            return encode_text(self.model, self.runner, text, keep=True)
        except Exception as error:
            release_frames(error)
            return error

    def _reading(self, text: Text) -> _Reading | None:
        """Return what a text asks of the encoders, by a dry run; None where there is none."""
        hollow: dict[str, list[Any]] = {unit.name: [] for unit in self.model.encoders}
        order: list[str] = []

        def encode(device: torch.device, modules: Modules) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
            for each in (order, *hollow.values()):
                each.clear()

            def listen(name: str, forward: Forward, args: tuple, kwargs: dict) -> Any:
                made = forward(*args, **kwargs)
                hollow[name].append(tree_map(_hollow, made))
                order.append(name)
                return made

            with _between(modules, listen):
                return embeddings_of(self.model, text, device, modules)

        try:
            encoding = replace(encoding_of(self.model, text), encode=encode)
            with quietly():
                forecast, cond = encoding.dry_run()
        except Exception as error:
            release_frames(error)
            return None
        first = list(dict.fromkeys(order))
        held = sum(
            leaf.nbytes for name in first[:-1] for leaf in tree_leaves(hollow[name]) if isinstance(leaf, _Hollow)
        )
        return _Reading(text, forecast, hollow, first, held + cond.nbytes)

    def _read_together(self, readings: list[_Reading]) -> None:
        """Encode texts that ask the same encoders in the same order, encoder by encoder."""
        readings = [reading for reading in readings if reading.order == readings[0].order]
        if len(readings) < 2:
            return
        order = readings[0].order
        for name in order:
            try:
                self._read_by(name, [each for each in readings if not each.alone], last=name == order[-1])
            except Exception as error:
                release_frames(error)
                log.info("Ballast: the prompts are encoded one by one (%s)", error)
                for reading in readings:
                    reading.alone = True
                return

    def _read_by(self, name: str, readings: list[_Reading], last: bool) -> None:
        """Run one encoder for all texts. The last one makes the conditionings."""

        def run(device: torch.device, _: Modules) -> None:
            for reading in readings:
                if reading.conditioning is None and not (name in reading.answers or reading.alone):
                    self._read(reading, name, device, last)

        forecast = _largest([reading.forecast for reading in readings])
        strategy = host_flags().strategy("auto", "text_encoder")
        expected = self.runner.expected("encode", self.model.encoders, lambda: forecast, strategy)
        work = "encode", cache_key(forecast.to_dict())
        self.runner.run(Stage("encode", self.model.encoders, run, strategy, work, **expected))

    def _read(self, reading: _Reading, real: str, device: torch.device, last: bool) -> None:
        text, asked = reading.text, dict.fromkeys(reading.order, 0)
        answered: list[tuple[Any, Any]] = []

        def answer(name: str, forward: Forward, args: tuple, kwargs: dict) -> Any:
            place = asked[name]
            asked[name] += 1
            if name == real:
                made = forward(*args, **kwargs)
                if not last:
                    answered.append((_on_host((args, kwargs)), _on_host(made)))
                return made
            where = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            if name not in reading.answers:
                return tree_map(lambda leaf: _zeros(leaf, where), reading.hollow[name][place])
            before, made = reading.answers[name][place]
            if not _same(before, _on_host((args, kwargs))):
                raise _AskedAnotherError
            return tree_map(lambda leaf: leaf.to(where) if isinstance(leaf, torch.Tensor) else leaf, made)

        self.model.truncation.start()
        modules = {unit.name: unit.module for unit in self.model.encoders}
        try:
            with _between(modules, answer):
                tensors = embeddings_of(self.model, text, device, modules)
            if last:
                made = conditioning_of(self.model, text, tensors)
                reading.conditioning = kept(self.model, self.runner, text, made)
                reading.answers.clear()
            else:
                reading.answers[real] = answered
        except Exception as error:
            if is_out_of_memory(error):
                raise
            release_frames(error)
            reading.alone = True
            reading.answers.clear()


class _AskedAnotherError(Exception):
    """An encoder is asked something else than before: it follows from what another one answers."""


def _between(modules: Modules, answer: Callable[[str, Forward, tuple, dict], Any]) -> ExitStack:
    """Until the block ends each call of these modules is `answer(name, forward, args, kwargs)`."""
    exits = ExitStack()
    for name, module in modules.items():

        def run(forward: Forward, args: tuple, kwargs: dict, name: str = name) -> Any:
            return answer(name, forward, args, kwargs)

        exits.callback(interpose(module, run))
    return exits


def _largest(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the forecast of a stage that runs all of these, one after the other."""

    def most(name: str) -> UnitForecast:
        works = [forecast.units[name] for forecast in forecasts]
        peak, held = max(works, key=lambda work: work.peak_bytes), dict[str, int]()
        for path, nbytes in (each for work in works for each in work.held):
            held[path] = max(nbytes, held.get(path, 0))
        return replace(
            peak,
            live_bytes=max(work.live_bytes for work in works),
            working_bytes=max(work.working_bytes for work in works),
            first_bytes=max(work.first_bytes for work in works),
            held=tuple(held.items()),
        )

    names = forecasts[0].units
    return Forecast(max(forecast.idle_bytes for forecast in forecasts), {name: most(name) for name in names})


def _hollow(leaf: Any) -> Any:
    return _Hollow(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _zeros(leaf: Any, device: torch.device) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, _Hollow) else leaf


def _on_host(tree: Any) -> Any:
    return tree_map(lambda leaf: to_host(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _same(one: Any, other: Any) -> bool:
    (leaves, structure), (others, other_structure) = tree_flatten(one), tree_flatten(other)
    if structure != other_structure:
        return False
    pairs = zip(leaves, others, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b for a, b in pairs)
