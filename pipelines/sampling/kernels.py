"""Compile a transformer's repeated blocks, and choose its attention backend, while it runs.

A block's own forward is compiled, and what a placement puts around it stays outside: it is the block's class that is
changed for a while. A placement may be made and dropped meanwhile, and may outlive the change.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ...memory.errors import is_out_of_memory, release_frames
from ...memory.weights.structure import block_lists

log = logging.getLogger("ballast")

AUTO = "auto"  # the attention that the model has
_VARIANTS = 64  # of one function: blocks of a class differ in sizes and parts, and beyond this torch stops compiling
_CHOICE = "_attention_backend"  # of a processor that asks diffusers

Backend = str | Callable[..., Any]

_running: weakref.WeakKeyDictionary[nn.Module, tuple[bool, str]] = weakref.WeakKeyDictionary()  # and how


@contextmanager
def kernels(
    modules: Iterable[nn.Module],
    compile: bool = False,
    attention: str = AUTO,
    *,
    backend: Backend = "inductor",
    dynamic: bool | None = None,
    on_compile: Callable[[bool], None] = lambda compiles: None,
) -> Iterator[None]:
    """Compile blocks and set the attention of modules until the block ends; then restore them.

    `compile` compiles the members of their block lists, each class of them once, for this and later runs. `backend` and
    `dynamic` are torch.compile's: by default what changes between two calls, such as the length of a prompt, is
    compiled for any value at the second. Where compiling fails or does not apply (weights that come while a block
    runs, a device that torch cannot compile for) blocks run as they are, and one line of the log says so. `on_compile`
    is told when compiling begins, and when it ends.

    `attention` is one of diffusers' attention backends. Raises what `check_attention` does before anything changes, and
    RuntimeError for a run within another one that would have these modules run in another way.
    """
    modules, chosen = list(modules), (compile, attention)
    around = [module for module in modules if module in _running]
    if any(_running[module] != chosen for module in around):
        raise RuntimeError("a run within a run cannot change compile and attention. Give it those of the outer one.")
    if around:
        yield
        return
    with ExitStack() as exits:
        for module in modules if chosen != (False, AUTO) else []:  # within a plain run others change nothing for good
            _running[module] = chosen
            exits.callback(_running.pop, module)
        if attention != AUTO:
            check_attention(attention, modules)
            exits.enter_context(_attention(modules, attention))
        if compile:
            # Its name in all versions of torch.
            exits.enter_context(torch._dynamo.config.patch(cache_size_limit=_VARIANTS))
            exits.enter_context(_compiled(modules, backend, dynamic))
            exits.enter_context(_heard(on_compile))
        yield


def compiles() -> int:
    """Return how many graphs this process has compiled so far: it no longer rises once a run has met all there is."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# Compiling


class _Compiled:
    """The forward of a class of blocks, compiled when first called; as it was once that has failed."""

    def __init__(self, forward: Callable[..., Any], backend: Backend, dynamic: bool | None) -> None:
        self.plain = forward
        self.failed = False
        self._backend, self._dynamic = backend, dynamic

    @functools.cached_property
    def _fast(self) -> Callable[..., Any]:
        return torch.compile(self.plain, backend=self._backend, dynamic=self._dynamic)  # raises on some systems

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.failed:
            return self.plain(block, *args, **kwargs)
        try:
            return self._fast(block, *args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error) and not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                raise
            reason = " ".join(str(error).split())[:200]
            release_frames(error)
        result = self.plain(block, *args, **kwargs)  # raises what was not the compiler's fault
        self.failed = True
        log.warning("Ballast: %s runs uncompiled, since compiling failed: %s", type(block).__name__, reason)
        return result


class _Use(NamedTuple):
    """A block whose forward may be the compiled one: that is known at each call."""

    compiled: _Compiled
    inside: list[dict[str, Any]]  # attributes of the modules in it
    said: set[str]  # by all blocks of a run

    def run(self, block: nn.Module, args: tuple, kwargs: dict) -> Any:
        if why := self._why_not(args, kwargs):
            if why not in self.said:
                self.said.add(why)
                log.warning("Ballast: %s runs uncompiled: %s", type(block).__name__, why)
            return self.compiled.plain(block, *args, **kwargs)
        return self.compiled(block, *args, **kwargs)

    def _why_not(self, args: tuple, kwargs: dict) -> str:
        if any("forward" in own for own in self.inside):  # which would be compiled along with it
            return "its layers fetch their weights one by one"
        device = next((value.device.type for value in (*args, *kwargs.values()) if torch.is_tensor(value)), None)
        return "" if device is None or _compiles_for(device) else f"torch.compile knows no device {device}"


_uses: weakref.WeakKeyDictionary[nn.Module, _Use] = weakref.WeakKeyDictionary()


@contextmanager
def _compiled(modules: list[nn.Module], backend: Backend, dynamic: bool | None) -> Iterator[None]:
    said: set[str] = set()
    blocks = list(dict.fromkeys(block for module in modules for _, blocks in block_lists(module) for block in blocks))
    classes = [type(block) for block in blocks]
    try:
        for block, cls in zip(blocks, classes, strict=True):
            inside = [vars(part) for part in block.modules() if part is not block]
            _uses[block] = _Use(_compiled_forward(cls.forward, backend, dynamic), inside, said)
            block.__class__ = _choosing(cls)  # type: ignore[assignment, arg-type]
        yield
    finally:
        for block, cls in zip(blocks, classes, strict=True):
            block.__class__ = cls  # type: ignore[assignment]
            _uses.pop(block, None)


@contextmanager
def _heard(on_compile: Callable[[bool], None]) -> Iterator[None]:
    from torch._dynamo.callback import callback_handler as torchs

    def begins(*_: Any) -> None:  # older versions of torch call it with nothing
        on_compile(True)

    def ends(*_: Any) -> None:
        on_compile(False)

    torchs.register_start_callback(begins)
    torchs.register_end_callback(ends)
    try:
        yield
    finally:
        torchs.remove_start_callback(begins)
        torchs.remove_end_callback(ends)


@functools.cache  # torch guards on the class
def _choosing(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls` with a forward that chooses at each call. A gate around it may outlive the time that a block is of it."""

    @functools.wraps(cls.forward)
    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        use = _uses.get(block)
        return cls.forward(block, *args, **kwargs) if use is None else use.run(block, args, kwargs)

    namespace = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), namespace)


# One for each class of blocks, so that all runs share what torch keeps with it.
_compiled_forward = functools.lru_cache(maxsize=64)(_Compiled)


@functools.cache
def _compiles_for(device_type: str) -> bool:
    from torch._dynamo.device_interface import get_interface_for_device

    try:
        get_interface_for_device(device_type)
    except NotImplementedError:
        return False
    return True


# Attention


def check_attention(name: str, modules: Iterable[nn.Module] = ()) -> None:
    """Raise ValueError for an attention that nobody knows or that none of the modules takes.

    ImportError, with what to install, for one whose package is missing.
    """
    if name == AUTO:
        return
    from diffusers.models.attention_dispatch import AttentionBackendName, _check_attention_backend_requirements

    # Those of the hub download code and run it.
    known = [backend.value for backend in AttentionBackendName if not backend.value.endswith("_hub")]
    if name not in known:
        raise ValueError(f"unknown attention {name!r}. Use {AUTO}, {', '.join(known)}.")
    try:
        _check_attention_backend_requirements(AttentionBackendName(name))
    except RuntimeError as error:
        raise ImportError(f"attention {name!r} cannot be used here: {error}") from None
    modules = list(modules)
    if modules and not any(map(_processors, modules)):
        classes = " and ".join(type(module).__name__ for module in modules)
        raise ValueError(f"{classes} takes no attention but its own, and {name!r} was asked for. Use {AUTO!r}.")


def _processors(module: nn.Module) -> list[Any]:
    """Return the attention processors that ask diffusers which attention to use."""
    takes = hasattr(module, "set_attention_backend")
    found = {id(p): p for part in module.modules() if hasattr(p := getattr(part, "processor", None), _CHOICE)}
    return list(found.values()) if takes else []


@contextmanager
def _attention(modules: list[nn.Module], name: str) -> Iterator[None]:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    taking: list[Any] = [module for module in modules if _processors(module)]
    own = [vars(processor) for module in taking for processor in _processors(module)]
    before = [{key: value for key, value in attributes.items() if key == _CHOICE} for attributes in own]
    active, _ = Registry.get_active_backend()  # which diffusers changes too
    try:
        for module in taking:
            module.set_attention_backend(name)
        yield
    finally:
        Registry.set_active_backend(active)
        for attributes, choice in zip(own, before, strict=True):
            attributes.pop(_CHOICE, None)
            attributes.update(choice)
