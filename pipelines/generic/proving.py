"""Pipelines that are compared with their own call when they are opened, and refused where the stages would differ."""

from __future__ import annotations

import inspect
import logging
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..planning.forecasts import quietly
from ..staged import StagedPipeline
from . import proof
from .batch_proof import compare_batch
from .proof import Verdict
from .rehearsal import StockCallError, rehearse
from .stock import encode_defaults

_PROOF = 5  # to be raised when proofs end in another way
# Errors of code that no shapes can be run through (AnyFlow-FAR's FlexAttention), whatever the stock call is given.
_ON_SHAPES = re.compile(r"\bmeta\b|in a dry run this one has none")
log = logging.getLogger("ballast")


class _StockFailedError(ValueError):
    """The stock call itself failed with its default arguments."""


class ProvenPipeline(StagedPipeline):
    """A pipeline with the facts that its proof found."""

    pipeline_class: Any
    inputs: frozenset[str]
    own: Mapping[str, str]
    tail = ""  # what its call does with what the VAE decodes, by its name in TAILS
    own_size = False  # whether it draws the size of its picture, whatever it is asked for
    text_options: Mapping[str, Any] = MappingProxyType({})  # of `encode`, without which the stock call fails
    fails = ""  # the stock call with its default arguments: the refusal, until a run gives those that it needs
    _call: Mapping[str, inspect.Parameter]

    _encode_prompt: Mapping[str, inspect.Parameter]

    @abstractmethod
    def _tool(self, name: str) -> Any:
        """Return a component without weights."""

    @abstractmethod
    def _without_weights(self, *prefixes: str) -> list[str]:
        """Return the names of components without weights that begin with one of `prefixes`."""

    def _prove_some(self) -> None:
        """Prove the first of some ways to run in stages that can be."""
        ways = [(self.replays, self.inputs)]
        if self.inputs and "last_image" in self._call:
            ways.append((self.replays, self.inputs | {"last_image"}))  # it may be made for a first and a last frame
        if not self.replays:
            ways.append((True, self.inputs))
        first: ValueError | None = None
        for self.replays, self.inputs in ways:
            try:
                self._prove()
            except ValueError as error:
                first = first or error
            else:
                return
        assert first is not None
        self.replays, self.inputs = ways[0]
        if not (isinstance(first, _StockFailedError) and (names := self._sized_options())):
            raise first
        self.fails = f"{first} Or give encode what this model needs, such as {names[0]}."

    def _sized_options(self) -> list[str]:
        """Return the names of the options of `encode` that are numbers, or several, by default."""
        own = encode_defaults(self._encode_prompt, self._call)
        known = self._encode_options()
        return [n for n, v in own.items() if n in known and isinstance(v, int | tuple) and not isinstance(v, bool)]

    def _check_proven(self) -> None:
        """Raise ValueError, in one line, where no run has given what the stock call needs."""
        if self.fails:
            self._prove_some()  # a run of another pipeline of the same files may have
        if self.fails:
            raise ValueError(self.fails)

    def _prove(self, texts: ProvenPipeline | None = None) -> None:
        """Raise ValueError, in one line, where the stages would not end as the stock call does.

        The prompt is encoded by `texts`, another class of the same parts.
        """
        verdict = self._compared(texts or self, {})
        if verdict.differs:
            error = _StockFailedError if verdict.stock_failed else ValueError
            name = self.pipeline_class.__name__
            raise error(f"{name} cannot be staged: {verdict.differs}. Run it with diffusers itself.")
        self.default_negative, self.left_out = verdict.negative, verdict.left_out
        self.latent_dimensions, self.own_size = verdict.dimensions, verdict.own_size
        self.tail, self.looks = verdict.tail, verdict.looks
        self.text_options, self.fails = verdict.needs, ""

    def _prove_needed(self, options: Mapping[str, Any]) -> None:
        """Compare with the options of a first run, where the stock call fails without any.

        They are kept with the verdict: they hold for all pipelines of these files. Raise ValueError, in one line, where
        they do not help, or a later run leaves them out.
        """
        plain = {n: v for n, v in options.items() if v is not None and not isinstance(v, str | torch.Tensor)}
        if self.fails and not plain:
            self._check_proven()
        if self.fails:
            verdict = self._compared(self, plain)
            if not verdict.differs:
                proof.keep(*self._place_of_proof(self, {}), replace(verdict, needs=plain))
            self._check_proven()
        if missing := [name for name in self.text_options if name not in options]:
            named = ", ".join(missing)
            raise ValueError(f"The own call of {self.title} fails without {named}. Give encode {named}.")

    def _prove_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError, in one line, where options that are texts or their embeddings would not count as in stock.

        They are compared when they are first given.
        """
        self._prove_needed(options)
        pairs = {name: name.startswith("negative_") or f"negative_{name}" in self._call for name in options}
        given = {name: options[name] for name, paired in sorted(pairs.items()) if paired and options[name] is not None}
        if given and (differs := self._compared(self, given).differs):
            raise ValueError(f"{self.pipeline_class.__name__} cannot be given {', '.join(given)} in stages: {differs}.")

    def _compared(self, texts: ProvenPipeline, options: Mapping[str, Any]) -> Verdict:
        """Return how the stages differ from the stock call, where the prompt is encoded with these options."""
        options = {**self.text_options, **options}
        directory, key = self._place_of_proof(texts, options)
        verdict = proof.recall(directory, key)
        if verdict is not None:
            return verdict
        for name in self._without_weights("tokenizer", "processor"):
            self._tool(name)  # one that cannot be read says so itself
        name = self.pipeline_class.__name__
        log.info("Ballast: comparing %s in stages with its own call, once for these versions", name)
        try:
            with quietly(), self.manager.between_stages():
                verdict = rehearse(self, texts, options)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, StockCallError) else error
            if type(cause) is NameError:  # of a package that diffusers imports where it is
                raise ImportError(f"{name} needs the package {cause.name}: pip install {cause.name}.") from error
            failed = isinstance(error, StockCallError) and not _ON_SHAPES.search(str(cause))
            return replace(proof.not_compared(cause or error), stock_failed=failed)  # maybe the machine; not kept
        proof.keep(directory, key, verdict)
        return verdict

    def _place_of_proof(self, texts: ProvenPipeline, options: Mapping[str, Any]) -> tuple[Path, str | None]:
        """Return the folder and the key of a verdict. Words and tensors among the options count by their type."""
        task: dict[str, Any] = {
            "inputs": sorted(self.inputs),
            "texts": texts.pipeline_class.__name__,
            "replays": self.replays,
        }
        if options:
            task["options"] = {
                name: type(value).__name__ if isinstance(value, torch.Tensor | str) else value
                for name, value in options.items()
            }
        return self.cache.directory / "proofs", self._forecaster.key(stage="proof", format=_PROOF, **task)

    def _batch_differs(self, texts: Any) -> str:
        if self.replays:
            return "its own call encodes the prompt"
        task: dict[str, Any] = {"inputs": sorted(self.inputs), "own": sorted(self.own)}
        task |= {"texts": texts.pipeline_class.__name__, "options": dict(self.text_options)}
        directory, key = self.cache.directory / "proofs", self._forecaster.key(stage="proof of a batch", **task)
        verdict = proof.recall(directory, key)
        if verdict is None:
            try:
                with quietly(), self.manager.between_stages():
                    verdict = compare_batch(self, texts)
            except Exception as error:
                verdict = proof.not_compared(error)
                proof.keep(None, key, verdict)  # it may have been the machine
            else:
                proof.keep(directory, key, verdict)
        return verdict.differs
