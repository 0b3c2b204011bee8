"""Models that are compared with their own call when they are opened, and refused where the stages would differ."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..encoding.conditioning import is_embeddings
from ..planning.forecasts import quietly
from ..stock.obstacles import obstacle
from ..stock.signatures import encode_defaults
from . import released, verdicts
from .batch_check import compare_batch
from .comparison import StockCallError, rehearse
from .cut_check import compare_cut
from .verdicts import Verdict

if TYPE_CHECKING:
    from ..models.diffusers.diffusers_model import DiffusersModel

# Errors of code that no shapes can be run through (AnyFlow-FAR's FlexAttention), whatever the stock call is given.
_ON_SHAPES = re.compile(r"\bmeta\b|in a dry run this one has none")
log = logging.getLogger("ballast")


class _StockFailedError(ValueError):
    """The stock call itself failed with its default arguments."""


def prove_some(model: DiffusersModel) -> None:
    """Accept the first way to run in stages that is the same as the stock call. Raise ValueError if none is."""
    ways = [(model.replays, model.inputs)]
    if model.inputs and "last_image" in model.call:
        ways.append((model.replays, model.inputs | {"last_image"}))  # it may be made for a first and a last frame
    if not model.replays:
        ways.append((True, model.inputs))
    first: ValueError | None = None
    for model.replays, model.inputs in ways:
        try:
            prove(model)
        except ValueError as error:
            first = first or error
        else:
            return
    assert first is not None
    model.replays, model.inputs = ways[0]
    if not (isinstance(first, _StockFailedError) and (names := _sized_options(model))):
        raise first
    model.fails = f"{first} Or give encode what this model needs, such as {names[0]}."


def _sized_options(model: DiffusersModel) -> list[str]:
    """Return the names of the options of `encode` that are numbers, or several, by default."""
    own = encode_defaults(model.encode_prompt, model.call)
    known = model.encode_options()
    return [n for n, v in own.items() if n in known and isinstance(v, int | tuple) and not isinstance(v, bool)]


def check_proven(model: DiffusersModel) -> None:
    """Raise ValueError, in one line, where no run has given what the stock call needs."""
    if model.fails:
        prove_some(model)  # a run of another pipeline of the same files may have
    if model.fails:
        raise ValueError(model.fails)


def prove(model: DiffusersModel, texts: DiffusersModel | None = None) -> None:
    """Raise ValueError, in one line, where the stages would not end as the stock call does.

    The prompt is encoded by `texts`, another class of the same parts.
    """
    verdict = _compared(model, texts or model, {})
    if verdict.differs:
        error = _StockFailedError if verdict.stock_failed else ValueError
        name = model.pipeline_class.__name__
        raise error(f"{name} cannot be staged: {verdict.differs}. Run it with diffusers itself.")
    model.accept(verdict)


def _prove_needed(model: DiffusersModel, options: Mapping[str, Any]) -> None:
    """Compare with the options of a first run, where the stock call fails without any.

    They are kept with the verdict: they hold for all pipelines of these files. Raise ValueError, in one line, where
    they do not help, or a later run leaves them out.
    """
    plain = {n: v for n, v in options.items() if not (v is None or isinstance(v, str) or is_embeddings(v))}
    if model.fails and not plain:
        check_proven(model)
    if model.fails:
        verdict = _compared(model, model, plain)
        if not verdict.differs:
            verdicts.keep(*_place_of_proof(model, model, {}), replace(verdict, needs=plain))
        check_proven(model)
    if missing := [name for name in model.text_options if name not in options]:
        named = ", ".join(missing)
        raise ValueError(f"The own call of {model.title} fails without {named}. Give encode {named}.")


def prove_options(model: DiffusersModel, options: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, where options that are texts or their embeddings would not count as in stock.

    They are compared when they are first given.
    """
    _prove_needed(model, options)
    pairs = {name: name.startswith("negative_") or f"negative_{name}" in model.call for name in options}
    given = {name: options[name] for name, paired in sorted(pairs.items()) if paired and options[name] is not None}
    if given and (differs := _compared(model, model, given).differs):
        raise ValueError(f"{model.pipeline_class.__name__} cannot be given {', '.join(given)} in stages: {differs}.")


def _compared(model: DiffusersModel, texts: DiffusersModel, options: Mapping[str, Any]) -> Verdict:
    """Return how the stages differ from the stock call, where the prompt is encoded with these options."""
    options = {**model.text_options, **options}
    directory, key = _place_of_proof(model, texts, options)
    verdict = verdicts.recall(directory, key)
    if verdict is None and not options:
        verdict = released.recall(model, texts, "stages", _task(model))
    if verdict is not None:
        return verdict
    for name in model.parts.without_weights("tokenizer", "processor"):
        model.parts.tool(name)  # one that cannot be read says so itself
    name = model.pipeline_class.__name__
    log.info("Ballast: comparing %s in stages with its own call, once for these versions", name)
    try:
        with quietly(), model.claims.manager.between_stages():
            verdict = rehearse(model, texts, options)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, StockCallError) else error
        if type(cause) is NameError:  # of a package that diffusers imports where it is
            raise ImportError(f"{name} needs the package {cause.name}: pip install {cause.name}.") from error
        failed = isinstance(error, StockCallError) and not _ON_SHAPES.search(str(cause))
        if why := obstacle(model.pipeline_class):
            log.debug("Ballast: %s was not compared (%s)", name, cause)
            return Verdict(why)
        return replace(verdicts.not_compared(cause or error), stock_failed=failed)  # maybe the machine; not kept
    verdicts.keep(directory, key, verdict)
    return verdict


def _place_of_proof(
    model: DiffusersModel, texts: DiffusersModel, options: Mapping[str, Any]
) -> tuple[Path, str | None]:
    """Return the folder and the key of a verdict. Words and tensors among the options count by their type."""
    task: dict[str, Any] = {**_task(model), "texts": texts.pipeline_class.__name__}
    if options:
        task["options"] = {
            name: type(value).__name__ if isinstance(value, str) or is_embeddings(value) else value
            for name, value in options.items()
        }
    return model.claims.cache.directory / "proofs", model.forecaster.key(stage="proof", **task)


def _task(model: DiffusersModel) -> dict[str, Any]:
    return {"inputs": sorted(model.inputs), "replays": model.replays}


def batch_differs(model: DiffusersModel, texts: DiffusersModel, own: Collection[str]) -> str:
    if model.replays:
        return "its own call encodes the prompt"
    task: dict[str, Any] = {"inputs": sorted(model.inputs), "own": sorted(own)}
    task |= {"texts": texts.pipeline_class.__name__, "options": dict(model.text_options)}
    return _proved(model, "batch", task, lambda: compare_batch(model, texts, own), texts)


def cut_differs(model: DiffusersModel, texts: DiffusersModel) -> str:
    """Return how a run that is cut in two would differ from the whole, in a few words; empty if not."""
    task: dict[str, Any] = {**_task(model), "texts": texts.pipeline_class.__name__, "options": dict(model.text_options)}
    return _proved(model, "cut", task, lambda: compare_cut(model, texts), texts)


def _proved(
    model: DiffusersModel, kind: str, task: Mapping[str, Any], proof: Callable[[], Verdict], texts: DiffusersModel
) -> str:
    directory, key = model.claims.cache.directory / "proofs", model.forecaster.key(stage=f"proof of a {kind}", **task)
    verdict = verdicts.recall(directory, key) or released.recall(model, texts, kind, task)
    if verdict is None:
        try:
            with quietly(), model.claims.manager.between_stages():
                verdict = proof()
        except Exception as error:
            verdict = verdicts.not_compared(error)
            verdicts.keep(None, key, verdict)  # it may have been the machine
        else:
            verdicts.keep(directory, key, verdict)
    return verdict.differs
