"""Run the calls of a transformer with a step cache.

The residual is what all blocks together add to their first input. It is kept from each computed call. In a skipped call
the first block returns its input with the residual added, and the others hand that on. What is outside of the blocks
runs in each call: the embeddings, and the last projection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...memory.planning.taint import named_arguments
from ...memory.reports.timeline import CallCount
from ...memory.weights.interpose import Forward, interpose
from ...memory.weights.unit import ManagedModel
from .cache_decisions import Decision, Moment, decision_of
from .step_cache import StepCache, block_paths, metadata_of

States = tuple[torch.Tensor, torch.Tensor | None]  # of the picture, and of the text where a block hands it on


Tell = Callable[[ManagedModel, CallCount], None]


@contextmanager
def caching(
    cache: StepCache, units: Mapping[ManagedModel, nn.Module], moment: Callable[[], Moment], tell: Tell
) -> Iterator[None]:
    """Skip the blocks of the units' modules in some of their calls, until the block ends. `tell` is told how many."""
    runs = [_CachedCalls(cache, unit, module, moment) for unit, module in units.items()]
    with ExitStack() as stack:
        for run in runs:
            stack.callback(run.end, tell)
            stack.callback(interpose(run.module, run))
        yield


@dataclass(frozen=True)
class _Block:
    """A block, and where its arguments and results have the states."""

    module: nn.Module
    names: tuple[str, ...]  # of its arguments, in order
    hidden: str
    text: str
    hidden_at: int  # in the results
    text_at: int | None  # in the results; None where a block does not hand the text on

    @classmethod
    def of(cls, module: nn.Module) -> _Block:
        known = metadata_of(module)
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        hidden, text = known.hidden_states_argument_name, known.encoder_hidden_states_argument_name
        hidden = hidden if hidden in names else names[0]  # of Z-Image it is "x", which diffusers does not tell
        at, text_at = known.return_hidden_states_index, known.return_encoder_hidden_states_index
        return cls(module, names, hidden, text, at, text_at)

    def inputs(self, args: tuple, kwargs: dict) -> States:
        """Return the states among the arguments of a call."""
        named = dict(zip(self.names, args, strict=False)) | kwargs
        return named[self.hidden], None if self.text_at is None else named[self.text]

    def outputs(self, results: Any) -> States:
        """Return the states among the results of a call."""
        if not isinstance(results, tuple):
            return results, None
        return results[self.hidden_at], None if self.text_at is None else results[self.text_at]

    def results(self, hidden: torch.Tensor, text: torch.Tensor | None) -> Any:
        """Return the states as the block returns them."""
        if self.text_at is None:
            return hidden
        return (hidden, text) if self.hidden_at < self.text_at else (text, hidden)


@dataclass
class _Pass:
    """What one pass of guidance keeps from call to call."""

    decision: Decision
    residuals: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # with their steps, the latest last
    text: torch.Tensor | None = None  # residual of the text, where the first block decides

    def residual(self, step: int) -> torch.Tensor | None:
        """Return the residual for a step: the latest, or of two the one that they lead to."""
        if not self.residuals:
            return None
        at, latest = self.residuals[-1]
        if len(self.residuals) == 1:
            return latest
        before_at, before = self.residuals[-2]
        return latest + (latest - before) * ((step - at) / (at - before_at))


class _CachedCalls:
    """Runs the calls of one transformer. Calls of one step are passes of guidance, each with a cache of its own."""

    def __init__(self, cache: StepCache, unit: ManagedModel, module: nn.Module, moment: Callable[[], Moment]) -> None:
        self.cache, self.unit, self.module, self._moment = cache, unit, module, moment
        self.calls = self.skipped = 0
        self._passes: list[_Pass] = []
        self._step, self._number = -1, 0
        self._blocks = [_Block.of(module.get_submodule(path)) for path in block_paths(module)]

    def __call__(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        now = self._moment()
        self._number = self._number + 1 if now.step == self._step else 0
        self._step = now.step
        if self._number == len(self._passes):
            self._passes.append(_Pass(decision_of(self.cache)))
        call = _Call(self.cache, self._blocks, self._passes[self._number], now, self.unit)
        made = call.run(forward, args, kwargs)
        self.calls += 1
        self.skipped += call.skips
        return made

    def end(self, tell: Tell) -> None:
        """Tell how many calls were skipped, and forget what is kept on the device."""
        if self.calls and not self.cache.dry:
            tell(self.unit, CallCount(str(self.cache), self.calls, self.skipped))
        self._passes.clear()


class _Call:
    """One call of a transformer. `skips` says whether its blocks hand their inputs on."""

    def __init__(self, cache: StepCache, blocks: list[_Block], kept: _Pass, now: Moment, unit: ManagedModel) -> None:
        self.cache, self.blocks, self.kept, self.now, self.unit = cache, blocks, kept, now, unit
        self.skips = False
        self._begun = 0  # calls of the first block: after memory ran out, or in parts of a batch, it has several
        self._first: States | None = None  # from where the residual counts

    def run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run the transformer, with its blocks or without."""
        latents = _stacked(next(iter(named_arguments(forward, args, kwargs).values())))  # the first of all of them
        with ExitStack() as stack:
            stack.callback(setattr, self.unit, "runs_partly", False)
            self._skip(self.kept.decision.skips(latents, self.now) and bool(self.kept.residuals))
            for at, block in enumerate(self.blocks):
                run = self._begin if at == 0 else self._end if at == len(self.blocks) - 1 else self._hand_on
                stack.callback(interpose(block.module, _bound(run, block)))
            made = forward(*args, **kwargs)
        self.kept.decision.ends(latents, _stacked(made[0]), self.skips)
        return made

    def _begin(self, block: _Block, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run the first block, or return its input with the residual added."""
        self._begun += 1
        if self.cache.runs_first:
            return self._begin_and_decide(block, forward, args, kwargs)
        hidden, text = block.inputs(args, kwargs)
        if self.skips:
            residual = self.kept.residual(self.now.step)
            if residual is not None and residual.shape == hidden.shape:
                return block.results(hidden + residual, text)
            self._skip(False)
        self._keep_first(hidden, None)
        return forward(*args, **kwargs)

    def _begin_and_decide(self, block: _Block, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run the first block, and decide by what it adds whether to run the others."""
        self._skip(False)
        before, _ = block.inputs(args, kwargs)
        made = forward(*args, **kwargs)
        hidden, text = block.outputs(made)
        residual = self.kept.residual(self.now.step)
        if self.kept.decision.first_block_skips(hidden - before) and residual is not None:
            self._skip(True)
            of_text = self.kept.text
            return block.results(hidden + residual, text if text is None or of_text is None else text + of_text)
        self._keep_first(hidden, text)
        return made

    def _hand_on(self, block: _Block, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run a block, or return its input."""
        return block.results(*block.inputs(args, kwargs)) if self.skips else forward(*args, **kwargs)

    def _end(self, block: _Block, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run the last block, and keep the residual, or return its input."""
        made = self._hand_on(block, forward, args, kwargs)
        if self.skips:
            return made
        (hidden, text), first = block.outputs(made), self._first
        self._first = None
        if first is None or self._begun > 1:
            self.kept.residuals.clear()
            return made
        begin, text_begin = first
        # Blocks of one stream (FLUX.2) return the text in front of the picture.
        residual = hidden[:, -begin.shape[1] :] - begin
        self.kept.residuals.append((self.now.step, residual))
        if text is not None and text_begin is not None and text.shape == text_begin.shape:
            self.kept.text = text - text_begin
        return made

    def _skip(self, skips: bool) -> None:
        self.skips = self.unit.runs_partly = skips

    def _keep_first(self, hidden: torch.Tensor, text: torch.Tensor | None) -> None:
        """Begin to compute. The residuals that are not needed any more make room for the next one."""
        self._first = hidden, text
        del self.kept.residuals[: len(self.kept.residuals) - self.cache.order]
        self.kept.text = None


def _stacked(states: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Return the states of a batch, which Z-Image has as a list, as one tensor."""
    return torch.stack(list(states)) if isinstance(states, list) else states


def _bound(run: Callable[..., Any], block: _Block) -> Callable[[Forward, tuple, dict], Any]:
    return lambda forward, args, kwargs: run(block, forward, args, kwargs)
