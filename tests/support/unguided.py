"""The unmodified pipeline without guidance in some steps, as `guidance_range` leaves it out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

_TEXTS = ("encoder_hidden_states", "cap_feats")


def given_to(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a transformer's call by name."""
    return dict(inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments)


def text_of(given: dict[str, Any]) -> Any:
    return next(given[name] for name in _TEXTS if name in given)


class Unguided:
    """Listens to a pipeline, which then steps by the prompt's prediction alone in all steps but the `guided` ones.
    `prompt` is what a run without guidance hands the transformer; None for such a run, which it finds it by."""

    def __init__(self, pipe: Any, guided: Collection[int] = (), prompt: Any = None) -> None:
        self.pipe, self.guided, self.prompt = pipe, guided, prompt
        self.rows, self.calls, self.last, self.step = list[int](), list[dict[str, Any]](), None, 0
        self._forward, self._take = pipe.transformer.forward, pipe.scheduler.step
        pipe.transformer.forward = functools.wraps(self._forward)(functools.partial(self.call))
        pipe.scheduler.step = functools.wraps(self._take)(functools.partial(self.take))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        given = given_to(self.pipe.transformer, args, kwargs)
        del given["self"]
        self.calls.append(given)
        self.last = text_of(given)
        self.rows.append(len(self.last))
        return self._forward(**given)

    def take(self, predicted: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.prompt is not None and self.step not in self.guided:
            predicted = self.prediction(predicted)
        self.calls.clear()
        self.step += 1
        return self._take(predicted, *args, **kwargs)

    def prediction(self, guided: torch.Tensor) -> torch.Tensor:
        """The prompt's prediction as the class hands it on: of the shape and sign of what it has made of both."""
        made = self._forward(**self.alone())[0]
        name = type(self.pipe).__name__
        if isinstance(made, list):
            made = torch.stack(made).squeeze(2)
        elif name == "LTXImageToVideoPipeline":  # whose first frame is given
            frames, height, width = guided.shape[2:]
            made = self.pipe._unpack_latents(made, frames + 1, height, width, 1, 1)[:, :, 1:]
        else:
            made = made[:, : guided.shape[1]]  # behind it are pictures that it was shown
        return (-made if name.startswith(("Lumina2", "ZImage")) else made).reshape(guided.shape)

    def alone(self) -> dict[str, Any]:
        """The arguments of the step's call that are the prompt's."""
        for given in self.calls:
            rows = len(text_of(given))
            for row in range(rows):
                own = {name: _row(value, row, rows) for name, value in given.items()}
                if _equal(text_of(own), self.prompt):
                    return own
        raise AssertionError("no call has the prompt")


def _row(value: Any, row: int, rows: int) -> Any:
    has_rows = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim)
    return value[row : row + 1] if has_rows and len(value) == rows else value


def _equal(text: Any, prompt: Any) -> bool:
    return all(map(torch.equal, text, prompt)) if isinstance(text, list) else torch.equal(text, prompt)


def guided_in(run: Callable[..., torch.Tensor], part: tuple[float, float]) -> torch.Tensor:
    """What an unmodified pipeline draws if only this part of the steps is guided. `run(listen, is_guided)` draws with
    it, after `listen(pipe)`."""
    heard: list[Unguided] = []
    run(lambda pipe: heard.append(Unguided(pipe)), False)
    steps = heard[0].step
    assert heard[0].rows == [1] * steps
    guided = [step for step in range(steps) if part[0] <= step / steps < part[1]]
    return run(lambda pipe: heard.append(Unguided(pipe, guided, heard[0].last)), True)
