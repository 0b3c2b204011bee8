"""Runs that take pictures: the class that takes them, and what sees them before the transformer samples.

The stock call runs on the CPU until it samples. What it asks of the VAE's encoder and of an image encoder meanwhile is
run in a stage of its own each; the answers are told again to the call that samples.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ...memory.weights.interpose import interpose
from ...memory.weights.unit import ManagedModel
from ..encoding.conditioning import Conditioning, to_host
from ..planning.forecasts import shapes_in
from ..planning.plans import SEEING, Sight
from ..staged import Frames, Negative, Pictures, Prompt, as_list, as_stock, handed
from .answers import Answers, Posterior, Run
from .recording import Recorded, Recording
from .stand_ins import LoopReachedError
from .stock import encode_defaults, needed_inputs, passes, returned_names
from .stock_parts import FRAMES, HOST, StockParts
from .tasks import EDITED, INPUTS, WORDS, task_of

_GUIDES = 3.0  # a scale of guidance that guides
_OWN = INPUTS - {"images", "image_reference", "reference_images"}
_FOLLOWED = {"control_image", "control_mask"}  # which a result need not start from
_SIDE = 64  # pixels of a picture that is not read
See = Callable[..., Any]  # answers `name, *args, **kwargs`: what a module is called with


class SeeingPipeline(StockParts):
    """A diffusers pipeline folder that takes pictures."""

    def with_pictures(self, pictures: Pictures) -> StockParts:
        task = task_of(self.pipeline_class, self.title, pictures)
        key = task.cls, frozenset(task.pictures)
        if key != (self.pipeline_class, self.inputs) and key not in self._tasks:
            self._tasks[key] = self._for_task(*key)
        run = copy.copy(self._tasks.get(key, self))
        for name in ("vram_bytes", "ram_bytes", "keep", "_then"):  # which may be those of a copy
            setattr(run, name, getattr(self, name))
        run.pictures, run.strength = task.pictures, pictures.strength
        starts = pictures.image and ("strength" in run._call or run._frames is not None)
        if starts or len(pictures.control) > 1:  # one to follow is the same for all that are drawn at once
            kept = _OWN if starts else _FOLLOWED
            several = (n for n, given in task.pictures.items() if n in kept and not isinstance(given, Frames))
            run.own = {name: WORDS.get(name, name) for name in several}
        return run

    def _for_task(self, cls: Any, inputs: frozenset[str]) -> StockParts:
        """Return a copy that another class drives, or that takes other pictures; compare it with its own call."""
        self._check_proven()
        task = copy.copy(self)
        vars(task).pop("sizes", None)
        task._tasks = {}  # those of this one hold it
        task.pipeline_class, task.inputs = cls, inputs
        task._init, task._call = (inspect.signature(code).parameters for code in (cls, cls.__call__))
        task._frames = next((name for name in FRAMES if name in task._call), None)
        task._prove(self)
        return task

    def look(self, cond: Conditioning, arguments: Mapping[str, Any], see: See) -> Answers:
        """Run the stock call until it samples, on the CPU. What it asks of modules that see a picture, `see` answers.

        `see(name, *args, **kwargs)` gives the answer opened.
        """
        answers = Answers()

        def ask(name: str) -> Run:
            if name in self._beside:  # which sees no picture: LTX-2's connectors
                return functools.partial(self._imagine, [], 0, name)
            return answers.ask(name, functools.partial(see, name))

        try:
            self._call_stock(cond, arguments, None, HOST, {}, ask)
        except LoopReachedError:
            return answers
        raise RuntimeError(f"{self.name} never samples")

    def _see(self, cond: Conditioning, arguments: Mapping[str, Any]) -> None:
        if "strength" in self._call and arguments["latents"] is not None:
            raise ValueError("noise: this run starts from a picture, and its noise from a seed. Give seed instead.")
        self.answers = self.look(cond, arguments, self._sight)

    def _sight(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "vae":
            posterior = Posterior()
            run = self._vae_run("encode", {}, self._vram_budget(), encode=posterior)
            return posterior.whole(run(*args))
        unit, part = self._unit_of(name)

        def see(device: torch.device, modules: Mapping[str, nn.Module]) -> Any:
            return tree_map_only(torch.Tensor, to_host, _called(modules[unit.name], device, args, kwargs))

        key, dry = self._dry_sight(name, args, kwargs)
        forecast = functools.partial(self._forecaster.forecast, key, SEEING, [unit], dry)
        expected = self._expected(SEEING, [unit], forecast, "auto")
        with _entered_at(unit.module, part):
            return self._run_stage(SEEING, [unit], see, work=key, **expected)

    def _foresee(self, cond: Conditioning, arguments: Mapping[str, Any], room_bytes: int) -> list[Sight]:
        sights: list[Sight] = []
        on_host = replace(cond, tensors={k: _zeros(v) for k, v in cond.tensors.items()})
        see = functools.partial(self._imagine, sights, room_bytes)
        self.answers = self.look(on_host, arguments, see)
        return sights

    def _imagine(self, sights: list[Sight], room_bytes: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """Zeros in the shape of a module's answer, by a dry run, which is added to the sights."""
        if name == "vae":
            posterior = Posterior()
            sights.append(Sight(self._vae_run("encode", {}, room_bytes, planned=True, encode=posterior), *args))
            made = self._vae_forecasts("encode", {}, room_bytes, posterior).dry_run(*args)[1]
            return posterior.whole(torch.zeros(made.shape))
        forecast, made = self._dry_sight(name, args, kwargs)[1]()
        sights.append(Sight(units=[self._unit_of(name)[0]], forecast=forecast))
        return tree_map_only(torch.Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), made)

    def handed(self, pictures: Sequence[torch.Tensor]) -> tuple[dict[str, Any], ...]:
        """Return what the stock call hands to `encode_prompt` for these pictures: the pictures, and numbers of its own.

        Once for the prompt and, where it guides, once for the negative one. The call runs on the CPU; what it asks of
        other modules before is imagined.
        """
        heard: list[dict[str, Any]] = []
        usual = encode_defaults(self._encode_prompt, self._call)

        def ask(name: str) -> Run:
            return Answers().ask(name, functools.partial(self._imagine, [], 0, name))

        tools = [name for name in self._without_weights("") if not name.startswith("scheduler")]
        pipe = self._pipeline(HOST, {}, *tools, ask=ask)
        names, signature = returned_names(self.pipeline_class.encode_prompt), inspect.signature(pipe.encode_prompt)

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = {name: value for name, value in bound.arguments.items() if isinstance(value, int | float)}
            own = {name: value for name, value in given.items() if name in usual and value != usual[name]}
            heard.append(own | {"image": handed(bound.arguments["image"])})
            if len(heard) > 1:
                raise LoopReachedError
            return tuple(torch.zeros(1, 1, 1) for _ in names) if len(names) > 1 else torch.zeros(1, 1, 1)

        pipe.encode_prompt = encode_prompt
        given: dict[str, Any] = {"prompt": "", **as_stock({"image": tuple(pictures)})}
        if "negative_prompt" in self._call:
            given["negative_prompt"] = ""
        if (scale := self.scales.cfg) in self._call:
            given[str(scale)] = _GUIDES
        try:
            pipe(**given)
        except Exception:
            if not heard:
                raise
        return tuple(heard)

    def record(
        self,
        prompt: Prompt,
        negative_prompt: Negative,
        options: Mapping[str, Any],
        device: torch.device,
        modules: Mapping[str, nn.Module],
    ) -> Recorded:
        """Record what the encoders make of a prompt in the stock call, with guidance and without, before it samples."""
        recording = Recording()
        texts = {"prompt": _plain(prompt), **{k: v for k, v in options.items() if k != "images"}}
        if "negative_prompt" in self._call and negative_prompt is not None:
            texts["negative_prompt"] = _plain(negative_prompt)
        missing = {name: (torch.full((_SIDE, _SIDE, 3), 0.5),) for name in needed_inputs(self.pipeline_class)}
        edited = next((name for name in EDITED if name in missing), EDITED[0])
        pictures = {edited: options["images"]} if "images" in options else {}
        if "images" in pictures and len(as_list(prompt)) > 1:  # its call takes a list of them for each prompt
            raise ValueError(f"{self.title} edits pictures by one prompt at a time. Encode one.")
        scale = self.scales.cfg
        for guidance in (_GUIDES, 1.0) if scale in self._call else (None,):
            before = recording.asked

            def ask(name: str, before: int = before) -> Run:
                return Answers().ask(name, functools.partial(self._imagined_first, recording, before, name))

            pipe = self._pipeline(device, modules, *self._without_weights(""), ask=ask)
            recording.listen(pipe)
            given = texts | as_stock(missing | pictures) | ({} if guidance is None else {str(scale): guidance})
            try:
                pipe(**given, output_type="pt")
            except LoopReachedError:
                continue
            except Exception:
                if recording.asked == before:
                    raise
        if recording.sees and missing.keys() - pictures.keys():
            raise ValueError(f"{self.title} reads a picture with its prompt. Give images.")
        return recording.tensors(len(as_list(prompt)), **texts)

    def _imagined_first(self, recording: Recording, before: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make up the answer of a module that sees pictures before the prompt is encoded. After that none is needed."""
        if recording.asked > before:
            raise LoopReachedError
        return self._imagine([], 0, name, *args, **kwargs)

    def _dry_sight(self, name: str, args: Any, kwargs: Any) -> tuple[str | None, Callable[[], Any]]:
        """Return the key of a module's call, and its dry run."""
        unit, part = self._unit_of(name)
        module = unit.skeleton()
        run = functools.partial(_called, module, args=args, kwargs=kwargs)
        key = self._forecaster.key(stage=SEEING, unit=name, **shapes_in({"args": args, **kwargs}))

        def dry_run() -> Any:
            with _entered_at(module, part):
                return self._forecaster.dry_run({unit.name: module}, run)

        return key, dry_run

    def _unit_of(self, name: str) -> tuple[ManagedModel, str]:
        """Return the unit that has a module, and the module's name in it: "" for the unit itself."""
        unit, _, part = name.partition(".")
        return self._units[unit], part

    def _passes(self, arguments: Mapping[str, Any]) -> int:
        return passes(self._call, arguments)


@contextmanager
def _entered_at(module: nn.Module, part: str) -> Iterator[None]:
    """Redirect the calls of a module to a module in it until the block ends, so that its weights come too."""
    undo = interpose(module, lambda _, args, kwargs: module.get_submodule(part)(*args, **kwargs)) if part else None
    try:
        yield
    finally:
        if undo:
            undo()


def _called(module: nn.Module, device: torch.device, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return module(*args, **kwargs)


def _plain(prompt: Prompt | None) -> str | list[str] | None:
    return prompt if prompt is None or isinstance(prompt, str) else list(prompt)


def _zeros(value: torch.Tensor | list[torch.Tensor]) -> Any:
    """Tensors of the same shapes, where a dry run left them without values."""
    return tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype) if t.is_meta else t, value)
