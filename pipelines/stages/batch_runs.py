"""Run many prompts, stage by stage. All are encoded, then all sampled, then all decoded, so models come once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...memory.errors import release_frames
from ..encoding.conditioning import Conditioning
from ..encoding.pictures import as_pictures
from ..encoding.prompts import Negative, Text, check_text
from ..stock.sound import Sound
from .encode import check_text_options, text_of
from .prompt_batches import PromptBatch

if TYPE_CHECKING:
    from ..pipeline import Pipeline, StageName

_MOST_BYTES = 2**30  # of embeddings in RAM at once
_SHARE = 4  # so many times as much RAM is spare, at least

Latents = MutableMapping[int, torch.Tensor]  # by number of the item


@dataclass(frozen=True)
class Item:
    """A prompt to run: with options of `encode`, its `images` among them, and arguments of `sample`.

    Each are called for when they are needed.
    """

    prompt: str
    negative_prompt: Negative = None
    encoding: Callable[[], dict[str, Any]] = dict
    sampling: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Made:
    """The outcome of an item in a stage: its pictures, as `decode` gives them, or why there will be none.

    Videos may have `sound`.
    """

    number: int
    stage: StageName
    images: torch.Tensor | None = None
    error: Exception | None = None
    sound: Sound | None = None


class BatchRuns:
    """Runs many items with one pipeline."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe = pipe

    def run(
        self, items: Sequence[Item], latents: Latents | None = None, known: Mapping[int, Conditioning] | None = None
    ) -> Generator[Made, None, None]:
        """Run items stage by stage, in chunks whose embeddings RAM holds, and tell what becomes of each.

        One that fails stops no other. `latents` hold what is sampled until its pictures are taken; what is there
        already is not sampled again, and that they take no more ends the run. `known` are conditionings of some items.
        """
        latents = {} if latents is None else latents
        run = BatchRuns(self.pipe.with_settings(keep=True, keeps_vae=True))
        left = list(range(len(items)))
        try:
            while left:
                conds = dict(known or {})
                chunk = yield from run.followed_by("sample", "decode").encode_chunk(items, left, latents, conds)
                left = left[len(chunk) :]
                yield from run._sample_chunk(items, [number for number in chunk if number in conds], latents, conds)
                then: list[StageName] = ["encode", "sample", "decode"] if left else []
                yield from run.followed_by(*then)._decode_chunk(chunk, latents)
        finally:
            self.pipe.manager.stop_reading([*self.pipe.encoders, *self.pipe.denoisers, *self.pipe.units_of("decode")])

    def followed_by(self, *stages: StageName) -> BatchRuns:
        """Return the same for a stage that `stages` follow."""
        return BatchRuns(self.pipe.followed_by(*stages))

    def encode(self, items: Sequence[Item]) -> list[Conditioning | Exception]:
        """Encode items, with an exception for one that fails. Each encoder is loaded once for as many as RAM holds."""
        found: dict[int, Conditioning | Exception] = {}
        while len(found) < len(items):
            left = [number for number in range(len(items)) if number not in found]
            conds: dict[int, Conditioning] = {}
            encoding = self.encode_chunk(items, left, {}, conds)
            found |= {made.number: made.error for made in encoding if made.error is not None}
            found |= conds
        return [found[number] for number in range(len(items))]

    def encode_chunk(
        self, items: Sequence[Item], left: list[int], latents: Latents, conds: dict[int, Conditioning]
    ) -> Generator[Made, None, list[int]]:
        """Encode items from the first of those left on, into `conds`. Returns which these are, the failed ones too."""
        texts: dict[int, Text] = {}
        pictures: dict[int, tuple[torch.Tensor, ...]] = {}
        for number in left:
            if number in latents or number in conds:
                continue
            try:
                texts[number], pictures[number] = self._text_of(items[number])
            except Exception as error:
                release_frames(error)
                yield Made(number, "encode", error=error)
        made: list[Conditioning | Exception] = []
        if texts:
            room = min(_MOST_BYTES, self.pipe.manager.ram_room() // _SHARE)
            made = PromptBatch(self.pipe.model, self.pipe.runner).encode(list(texts.values()), room)
        for number, found in zip(texts, made, strict=False):
            if isinstance(found, Exception):
                yield Made(number, "encode", error=found)
            else:
                conds[number] = replace(found, pictures=pictures[number])
                yield Made(number, "encode")
        done = list(texts)[: len(made)]
        return left if len(done) == len(texts) else left[: left.index(list(texts)[len(done)])]

    def _text_of(self, item: Item) -> tuple[Text, tuple[torch.Tensor, ...]]:
        check_text(item.prompt, item.negative_prompt)
        options = item.encoding()
        pictures = as_pictures(options.pop("images", None), "images")
        model = self.pipe.model
        check_text_options(model, self.pipe.runner, options)
        return text_of(model, item.prompt, item.negative_prompt, model.pictures_read(pictures) | options), pictures

    def _sample_chunk(
        self, items: Sequence[Item], numbers: Sequence[int], latents: Latents, conds: dict[int, Conditioning]
    ) -> Iterator[Made]:
        """Sample these items into `latents`; what they are sampled from is let go of."""
        more, last = self.followed_by("sample", "decode"), self.followed_by("decode")
        try:
            for number in numbers:
                run = last if number == numbers[-1] else more
                yield run._sample_item(number, items[number], conds.pop(number), latents)
        finally:
            self.pipe.manager.end_stage(self.pipe.denoisers, False)

    def _decode_chunk(self, numbers: Sequence[int], latents: Latents) -> Iterator[Made]:
        """Decode those of these items that are sampled. What was yielded is let go of."""
        try:
            for number in numbers:
                if number not in latents:
                    continue
                made = self._decode_item(number, latents)
                yield made
                if made.error is None:
                    del latents[number]
        finally:
            self.pipe.manager.end_stage(self.pipe.units_of("decode"), False)

    def _sample_item(self, number: int, item: Item, cond: Conditioning, latents: Latents) -> Made:
        try:
            made = self.pipe.sample(cond, **item.sampling())
        except Exception as error:
            release_frames(error)
            return Made(number, "sample", error=error)
        latents[number] = made  # where this cannot be kept no other could be: the run ends, and draws no more in vain
        return Made(number, "sample")

    def _decode_item(self, number: int, latents: Latents) -> Made:
        try:
            sampled = latents[number]
            return Made(number, "decode", self.pipe.decode(sampled), sound=self.pipe.decode_sound(sampled))
        except Exception as error:
            release_frames(error)
            return Made(number, "decode", error=error)
