"""Stand-ins that a stock pipeline runs with while the transformer samples: for its VAE and its scheduler's step."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ...memory.weights.unit import ManagedModel
from ..sampling.batches import Generators, generators
from ..sampling.cache_decisions import Moment
from ..sampling.latents import GENERATOR, StepCheck, check_noise, note_noise, note_sound, states_of
from ..sampling.step_range import StepRange
from .answers import Telling
from .signatures import returned_names

if TYPE_CHECKING:
    from ..models.model import OnStep

_EXPECTING = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "FlowSampler",
)  # say at each step how it would end


_COLOURS = 3  # channels of pixels


class StandIn(nn.Module):
    """Stands in for a module that is not there to run: answers what code asks of it."""

    def __init__(
        self, unit: ManagedModel, device: torch.device, dtype: torch.dtype, ask: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_unit", unit)  # not a child: its weights stay where they are
        self.device, self.dtype = device, dtype
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_unit"].module, name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters of the unit that it stands for: some code asks for their type."""
        return self.__dict__["_unit"].module.parameters(recurse)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Return the modules of a copy of the unit: some code sets their attention processors."""
        if "_unit" not in self.__dict__:
            return super().named_modules(*args, **kwargs)
        return self.__dict__["_unit"].skeleton().named_modules(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the answer of `ask`. Raises LoopReachedError without one."""
        if self._ask is None:
            raise LoopReachedError
        return self._ask(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the unit that it stands for: some code asks for the kind of its VAE."""
        return type(self.__dict__["_unit"].module) if "_unit" in self.__dict__ else StandIn


class StandInEncoder(StandIn):
    """Stands in for a text encoder while the transformer runs. What its modules are asked, `ask` answers.

    `ask` gives the call of a module by its name in the encoder, as of the part of Motif's that sees a picture.
    """

    def __init__(
        self,
        unit: ManagedModel,
        device: torch.device,
        dtype: torch.dtype,
        ask: Callable[[str], Callable[..., Any]],
    ) -> None:
        super().__init__(unit, device, dtype)
        self._ask_part = ask

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return StandInPart(found, self.dtype, self._ask_part(name)) if isinstance(found, nn.Module) else found


class StandInPart:
    """Stands in for a module of one that is not there to run."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, ask: Callable[..., Any]) -> None:
        self._module, self.dtype, self._ask = module, dtype, ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Return the parameters of the module that it stands for, in the dtype of its run: some code asks for it."""
        return (parameter.to("meta", self.dtype) for parameter in self._module.parameters(recurse))


class PartCaller:
    """A module for code that calls `parts` of it by themselves: it calls the whole, which runs that part.

    `at` is the path of what this one stands for: the module itself, a part, or what leads to one, such as a list of
    layers.
    """

    def __init__(self, module: nn.Module, parts: Collection[str], at: str = "") -> None:
        self._module, self._parts, self._at = module, parts, at

    def __getattr__(self, name: str) -> Any:
        path = f"{self._at}.{name}" if self._at else name
        if any(part == path or part.startswith(f"{path}.") for part in self._parts):
            return PartCaller(self._module, self._parts, path)
        return getattr(self._module.get_submodule(self._at), name)

    def __len__(self) -> int:
        return len(self._module.get_submodule(self._at))  # type: ignore[arg-type]  # a list of layers

    def __getitem__(self, at: int | slice) -> Any:
        places = range(len(self))[at]
        return getattr(self, str(places)) if isinstance(places, int) else [self[place] for place in places]

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, call_part=self._at, **kwargs)


class StandInVae(StandIn):
    """Stands in for a VAE while the transformer runs, and catches what it is asked to decode.

    What it is asked to encode, `ask` answers. The state of a generator that it is given is noted on the latents. Where
    sound is decoded `after` the pictures, its decoder is handed what the VAE was to decode, and the call goes on to it
    with pictures of one pixel.
    """

    def __init__(self, *args: Any, after: StandInSound | None = None) -> None:
        super().__init__(*args)
        object.__setattr__(self, "_after", after)

    def decode(self, latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        from diffusers.models.autoencoders.vae import DecoderOutput

        note_noise(latents, states_of(kwargs.get(GENERATOR)))
        if self._after is None or self._after.pictures is not None:
            raise DecodeCalledError(latents)
        self._after.pictures = latents
        return DecoderOutput(latents.new_zeros((len(latents), _COLOURS, *[1] * (latents.ndim - 2))))

    def encode(self, pixels: torch.Tensor, return_dict: bool = True) -> Any:
        made = self.forward(pixels)
        return made if return_dict else tuple(made.values())


class StandInSound(StandIn):
    """Stands in for the first module that makes sound of its latents, and catches these.

    `pictures` are the latents that the VAE was to decode before.
    """

    def __init__(self, unit: ManagedModel, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(unit, device, dtype)
        self.pictures: torch.Tensor | None = None

    def forward(self, latents: torch.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        self.decode(latents)

    def decode(self, latents: torch.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        if self.pictures is None:
            raise RuntimeError("the pipeline decodes its sound before its pictures")
        pictures, self.pictures = self.pictures, None
        raise DecodeCalledError(pictures, sound=latents)


class LateTool:
    """A tokenizer that is read when it is asked for something."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)


class LoopReachedError(Exception):
    """A module was called that is not there to run: what comes before the loop is done."""


class DecodeCalledError(Exception):
    """Carries the latents out of a pipeline's call, those of its `sound` noted on them."""

    def __init__(self, latents: torch.Tensor, reached: str = "its decoder", sound: torch.Tensor | None = None) -> None:
        super().__init__(f"the pipeline reached {reached}")
        self.latents = latents
        if sound is not None:
            note_sound(latents, (sound,) if len(latents) == 1 else sound.chunk(len(latents)))


@contextmanager
def keeping_processors(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back the attention processors that a call changes until the block ends, as those of perturbed attention.

    Such a call does so itself behind its VAE, where this one has ended.
    """
    layers = [layer for module in modules for layer in module.modules() if "processor" in vars(layer)]
    kept = [(layer, layer.processor) for layer in layers]
    try:
        yield
    finally:
        for layer, processor in kept:
            layer.processor = processor


def keeping_embeddings(encode: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `encode_prompt` to return the embeddings that it is given, which CogView3's does not.

    Negative ones are left out where the call does not guide: AnyFlow's takes their being there for guidance.
    """
    names, signature = returned_names(encode), inspect.signature(encode)

    @functools.wraps(encode)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        made = encode(*bound.args, **bound.kwargs)  # Latte's does without an attention mask where it has both
        values = made if isinstance(made, tuple) else (made,)
        kept = [value if given.get(name) is None else given[name] for name, value in zip(names, values, strict=True)]
        if given.get("do_classifier_free_guidance") is False:
            kept = [None if name.startswith("negative_") else value for name, value in zip(names, kept, strict=True)]
        return tuple(kept) if isinstance(made, tuple) else kept[0]

    return encode_prompt


def checking_noise(prepare: Callable[..., Any], telling: Telling) -> Callable[..., Any]:
    """Wrap `prepare_latents` to raise ValueError for given noise of another shape than it would draw.

    What it is told of a picture meanwhile, it is told once more.
    """
    signature = inspect.signature(prepare)

    @functools.wraps(prepare)
    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        drawn = signature.bind(*args, **kwargs)
        if (noise := drawn.arguments.get("latents")) is not None:
            drawing = drawn.arguments.get("generator")
            fresh = generators(0, 0, len(drawing) if isinstance(drawing, list) else 1)
            drawn.arguments |= {"latents": None, "generator": fresh}
            with telling.again():
                made = prepare(*drawn.args, **drawn.kwargs)
            check_noise(noise, (made[0] if isinstance(made, tuple) else made).shape)
        return prepare(*args, **kwargs)

    return prepare_latents


class Entering:
    """Latents of the loop that another run left, in `dtype`, by default that of noise: what a run goes on from."""

    def __init__(self, latents: torch.Tensor, dtype: torch.dtype | None) -> None:
        self._latents, self._dtype = latents, dtype
        self._given: torch.Tensor | None = None

    def in_place_of_noise(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `prepare_latents` to return them in place of noise, which is drawn all the same.

        What its call draws after that, as LTX does behind its loop, is then the same.
        """

        @functools.wraps(prepare)
        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            noise = made[0] if isinstance(made, tuple) else made
            if noise.shape != self._latents.shape:
                raise ValueError(
                    f"the latents to go on from are {list(self._latents.shape)}; this run takes {list(noise.shape)}. "
                    "Give those of a run of this size."
                )
            # Strides, which steps keep, decide which kernels run, and so the last bits: FLUX.2 transposes its noise.
            self._given = torch.empty_like(noise, dtype=self._dtype).copy_(self._latents)
            return (self._given, *made[1:]) if isinstance(made, tuple) else self._given

        return prepare_latents

    def check(self, sample: torch.Tensor) -> None:
        """Raise RuntimeError if they are not the sample that the first step is handed."""
        given, self._given = self._given, None
        if given is None or sample.shape != given.shape or not torch.equal(sample.float(), given.float()):
            raise RuntimeError("this pipeline changes the latents that it goes on from before its first step. Leave "
                               "start_step out.")  # fmt: skip


class Steps:
    """Replaces `step` of a pipeline's scheduler, which all call once a step, and calls `on_step` after it.

    Gives the step the run's generators where it draws noise: else the seed would not decide the result.

    Both are held weakly, or they would keep tensors until the collector runs.

    Of a `part` of the steps the first has to be handed the latents `entering`.
    """

    def __init__(
        self,
        pipe: Any,
        generator: Generators,
        on_step: OnStep | None,
        part: StepRange | None = None,
        entering: Entering | None = None,
    ) -> None:
        self.scheduler, self.step, self.on_step = weakref.ref(pipe.scheduler), _weak_step(pipe.scheduler), on_step
        self._pipe = weakref.ref(pipe)
        functools.update_wrapper(self, self.step)
        draws = "generator" in inspect.signature(self.step).parameters
        self.drawing = {"generator": generator} if draws else {}
        self.taken, self.part, self._entering = 0, part, entering
        self.leaves = False  # whether the last step ends the call, of one that has no callback
        self.finite = StepCheck()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the scheduler (LTX-2 makes one for the sound) steps without reporting.
        return _weak_step(copy.deepcopy(self.scheduler(), memo))

    def position(self) -> tuple[int, int]:
        """Return how many steps are taken, and how many the run takes. Of part of a run, where that is in the whole."""
        if self.part is not None:
            return self.part.first + self.taken, self.part.whole
        return self.taken, self._count()

    def _count(self) -> int:
        """Return how many steps run."""
        return len(self.scheduler().timesteps) - self._left_out()  # type: ignore[union-attr]  # it runs

    def _left_out(self) -> int:
        """Return how many of the scheduler's first steps a run from a picture leaves out."""
        scheduler: Any = self.scheduler()
        if (first := getattr(scheduler, "begin_index", None)) is not None:
            return first
        told = getattr(self._pipe(), "_num_timesteps", None)
        return max(0, len(scheduler.timesteps) - told) if told else 0

    def moment(self) -> Moment:
        """Return the position, with the noise level of the step that runs."""
        scheduler: Any = self.scheduler()
        step, steps = self.position()
        at = self.taken + self._left_out()
        return Moment(step, steps, float(scheduler.sigmas[at]) if hasattr(scheduler, "sigmas") else 0.0)

    def __call__(self, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler: Any = self.scheduler()
        if self._entering is not None and not self.taken:
            self._entering.check(sample)
        result = self.step(model_output, timestep, sample, *args, **(self.drawing | kwargs))
        self.taken += 1
        made = result[0] if isinstance(result, tuple) else result.prev_sample
        steps = self._count()
        self.finite.check(made, self.taken, steps)
        self._report(scheduler, model_output, sample, made, steps)
        if self.leaves and self.taken == steps:
            raise DecodeCalledError(made, "its last step")
        return result

    def leave(self, pipe: Any, step: int, time: Any, kept: dict[str, Any]) -> dict[str, Any]:
        """Take the place of `callback_on_step_end`: raise DecodeCalledError with the latents after the last step."""
        if self.taken == self._count():
            raise DecodeCalledError(kept["latents"], "its last step")
        return kept

    def _report(self, scheduler: Any, model_output: Any, sample: Any, made: Any, steps: int) -> None:
        if self.on_step is None:
            return
        if type(scheduler).__name__ in _EXPECTING:
            latents = sample - scheduler.sigmas[scheduler.step_index - 1] * model_output
        else:
            latents = made
        self.on_step(self.taken, steps, latents)


def watch_steps(pipe: Any, generator: Generators, on_step: OnStep | None) -> Steps | None:
    """Watch the steps of a pipeline's scheduler. Return None where it has none: Echo's blocks step by themselves."""
    if getattr(pipe, "scheduler", None) is None:
        return None
    pipe.scheduler.step = steps = Steps(pipe, generator, on_step)
    return steps


def _weak_step(scheduler: Any) -> MethodType:
    """Bind a scheduler's `step` weakly, so that it can be an attribute of the scheduler."""
    return MethodType(type(scheduler).step, weakref.proxy(scheduler))
