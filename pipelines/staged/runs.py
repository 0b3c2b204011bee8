"""ManyRuns: many prompts, stage by stage. All are encoded, then all sampled, then all decoded, so models come once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...memory.errors import release_frames
from ..encoding.conditioning import Conditioning
from ..lora.use import refuse_scales
from ..options import plain_defaults
from .family import StageName
from .pictures import as_pictures
from .prompts import Negative
from .samples import SampleStage
from .texts import ManyTexts, Text
from .vae import VaeStages

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
    """The outcome of an item in a stage: its pictures, as `decode` gives them, or why there will be none."""

    number: int
    stage: StageName
    images: torch.Tensor | None = None
    error: Exception | None = None


class ManyRuns(ManyTexts, SampleStage, VaeStages):
    """The stages of a pipeline, for many prompts at once."""

    def run(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | None = None,
        negative_prompt: Negative = None,
        **settings: Any,
    ) -> Iterator[torch.Tensor]:
        """Yield the pictures of each prompt, as `decode` gives them: all encoded, then all sampled, then all decoded.

        So each model comes to the device once for all of them. `seeds` are by default 0; `settings` are arguments of
        `sample`. What is wrong with a prompt is raised when it would be encoded or sampled.
        """
        seeds = [0] * len(prompts) if seeds is None else seeds
        if isinstance(prompts, str) or len(seeds) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts and {len(seeds)} seeds. Give a list, and as many seeds."
            )
        items = [
            Item(prompt, negative_prompt, sampling=functools.partial(dict, settings, seed=seed))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        with closing(self.run_items(items)) as running:
            for made in running:
                if made.error is not None:
                    raise made.error
                if made.images is not None:
                    yield made.images

    def run_items(
        self, items: Sequence[Item], latents: Latents | None = None, known: Mapping[int, Conditioning] | None = None
    ) -> Generator[Made, None, None]:
        """Run items stage by stage, in chunks whose embeddings RAM holds, and tell what becomes of each.

        One that fails stops no other. `latents` hold what is sampled until its pictures are taken; what is there
        already is not sampled again, and that they take no more ends the run. `known` are conditionings of some items.
        """
        latents = {} if latents is None else latents
        run = self.within(self.vram_bytes, self.ram_bytes, keep=True)
        run.keeps_vae = True
        left = list(range(len(items)))
        try:
            while left:
                conds = dict(known or {})
                chunk = yield from run.followed_by("sample", "decode")._encode_chunk(items, left, latents, conds)
                left = left[len(chunk) :]
                yield from run._sample_chunk(items, [number for number in chunk if number in conds], latents, conds)
                then: list[StageName] = ["encode", "sample", "decode"] if left else []
                yield from run.followed_by(*then)._decode_chunk(chunk, latents)
        finally:
            run.manager.stop_reading([*run.encoders, *run.denoisers, run.decoder])

    @plain_defaults()
    def encode_items(self, items: Sequence[Item]) -> list[Conditioning | Exception]:
        """Encode items, with an exception for one that fails. Each encoder is loaded once for as many as RAM holds."""
        found: dict[int, Conditioning | Exception] = {}
        while len(found) < len(items):
            left = [number for number in range(len(items)) if number not in found]
            conds: dict[int, Conditioning] = {}
            encoding = self._encode_chunk(items, left, {}, conds)
            found |= {made.number: made.error for made in encoding if made.error is not None}
            found |= conds
        return [found[number] for number in range(len(items))]

    def _encode_chunk(
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
            made = self.encode_some(list(texts.values()), min(_MOST_BYTES, self.manager.ram_room() // _SHARE))
        for number, found in zip(texts, made, strict=False):
            if isinstance(found, Exception):
                yield Made(number, "encode", error=found)
            else:
                conds[number] = replace(found, pictures=pictures[number])
                yield Made(number, "encode")
        done = list(texts)[: len(made)]
        return left if len(done) == len(texts) else left[: left.index(list(texts)[len(done)])]

    def _text_of(self, item: Item) -> tuple[Text, tuple[torch.Tensor, ...]]:
        options = item.encoding()
        pictures = as_pictures(options.pop("images", None), "images")
        self._check_options(options)
        refuse_scales(self._loras, options)
        negative = self._negative(item.prompt, item.negative_prompt)
        return Text(item.prompt, negative, self._pictures_read(pictures) | options), pictures

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
            self.manager.end_stage(self.denoisers, False)

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
            self.manager.end_stage([self.decoder], False)

    def _sample_item(self, number: int, item: Item, cond: Conditioning, latents: Latents) -> Made:
        try:
            made = self.sample(cond, **item.sampling())
        except Exception as error:
            release_frames(error)
            return Made(number, "sample", error=error)
        latents[number] = made  # where this cannot be kept no other could be: the run ends, and draws no more in vain
        return Made(number, "sample")

    def _decode_item(self, number: int, latents: Latents) -> Made:
        try:
            return Made(number, "decode", self.decode(latents[number]))
        except Exception as error:
            release_frames(error)
            return Made(number, "decode", error=error)
