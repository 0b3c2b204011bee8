"""A component whose weights lie in a single file, beside a base: the folder that has its config and all else."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ....memory.weights.encoding import Source, holds, kernels_of
from ....memory.weights.stored import Stored, file_identity, shards_of, stamps_of
from ....memory.weights.unit import building
from ..building import on_meta
from ..components import Component
from ..keys import key_text
from ..placing import read_whole
from .contents import SingleFile, type_of
from .encoders import PICTURE, TEXT, read_encoder, reads_text_alone, without_tower
from .layouts import Layout

# What a ControlNet has of its transformer and no weight of it tells: where tokens lie, and how heads divide them.
_OF_TRANSFORMERS = ("axes_dims_rope", "sample_size", "patch_size", "attention_head_dim", "in_channels", "out_channels")


@dataclass(frozen=True)
class FileComponent(Component):
    """A component of which `single` has all weights. Loading is strict: each one is there, and none is left over."""

    single: SingleFile = None  # type: ignore[assignment]  # it follows fields that have defaults

    @cached_property
    def files(self) -> tuple[list[Path], str | None]:
        """The one file, or its shards; it has no variant."""
        return shards_of(self.single.path), None

    @cached_property
    def run_dtype(self) -> torch.dtype:
        """The type that the weights run in."""
        return self.dtype or type_of(self.single.path)

    def identity(self) -> list[str]:
        """Digests of the file or its shards, and of the config."""
        return [*map(file_identity, self.files[0]), self._config_text]

    @cached_property
    def key(self) -> Hashable:
        """The identity of the model: its file, and how it is run."""
        return self.name, self.cls, self.run_dtype, self._config_text, stamps_of(self.files[0])

    @cached_property
    def stored(self) -> dict[str, Source]:
        """Where each parameter lies. ValueError for one that is missing, left over, or of another shape."""
        with building:
            module = self._build()
        path, places, what = self.single.path, self.single.places, self.cls.__name__
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        if missing := sorted(parameters.keys() - places.keys()):
            raise ValueError(
                f"{path} lacks {len(missing)} weights of {what}, such as {missing[0]}. Get the whole model."
            )
        if surplus := sorted(places.keys() - parameters.keys() - buffers.keys()):
            raise ValueError(
                f"{path} holds {len(surplus)} weights that {what} has no place for, such as {surplus[0]}. "
                "It is of another model: get the plain one."
            )
        kernels = kernels_of(module)
        for name, tensor in {**parameters, **{name: buffers[name] for name in buffers if name in places}}.items():
            if not holds(places[name].shape, tensor.shape, id(tensor) in kernels):
                raise ValueError(
                    f"{path} has {name} as {list(places[name].shape)} where {what} has {list(tensor.shape)}: it is of "
                    f"another model than {self.folder.parent}. Give that model's folder as base."
                )
        found = {name: self.single.source(name) for name in parameters}
        for name, source in found.items():
            if isinstance(source, Stored) and not source.dtype.is_floating_point:
                raise ValueError(f"{path} has {name} in whole numbers ({source.dtype}). Get the plain file.")
        return found

    def _structure(self) -> nn.Module:
        from transformers import PreTrainedModel

        if issubclass(self.cls, PreTrainedModel):
            return super()._structure()
        return self.cls.from_config(dict(self.config))  # type: ignore[attr-defined, no-any-return]

    def _read_buffers(self, names: list[str]) -> dict[str, torch.Tensor]:
        return {name: read_whole(self.single.source(name)) for name in names if name in self.single.places}

    def _read(self) -> NoReturn:
        path = self.single.path
        raise ValueError(f"{path} holds weights that cannot be read as {self.run_dtype}. Get the plain model.")

    @property
    def _config_text(self) -> str:
        return key_text(self.config)


def transformer_component(base: Component, single: SingleFile) -> FileComponent:
    """Return the transformer of `base` with the weights of a file, as deep and wide as these are.

    ValueError, in one line, where the file is of another model.
    """
    layout = _layout_for(base, single)
    if found := difference(base.cls, base.config, single):
        raise ValueError(
            f"{single.path} has {found[0]} = {found[1]}, where {base.folder / 'config.json'} has {found[2]}: it is "
            f"another {single.title}. Give that model's folder as base."
        )
    told = layout.config(single.shapes, _completed(base.cls, base.config))
    made = {**base.config, **{name: value for name, value in told.items() if name in layout.sizes}}
    return _checked(FileComponent(base.name, base.folder, base.cls, base.dtype, made, single=single))


def difference(cls: type, config: Mapping[str, Any], single: SingleFile) -> tuple[str, Any, Any] | None:
    """Compare a file with a config of that class, but for the sizes of a model that was made smaller.

    The name of the first such value, what the file has, and what the config has; None where all are the same.
    ValueError, in one line, for a file that lacks a weight whose shape is to tell.
    """
    layout, completed = single.layout, _completed(cls, config)
    assert layout is not None
    try:
        told = layout.config(single.shapes, completed)
    except KeyError as error:
        raise ValueError(f"{single.path} lacks {error.args[0]}. Get the whole model.") from error
    for name, value in told.items():
        if name not in layout.sizes and not _same(value, completed.get(name)):
            return name, value, completed.get(name)
    return None


def plain_component(base: Component, single: SingleFile) -> FileComponent:
    """Return a VAE, or what prepares text, with the weights of a file and the config of its `base`.

    ValueError, in one line, where the file is another's.
    """
    _layout_for(base, single)
    return _checked(FileComponent(base.name, base.folder, base.cls, base.dtype, base.config, single=single))


def controlnet_component(base: Component, single: SingleFile, transformer: Mapping[str, Any]) -> FileComponent:
    """Return a ControlNet with the weights of a file, of which the config of its `transformer` tells what they do not.

    ValueError, in one line, where the file is of another model.
    """
    layout, taken = _layout_for(base, single), inspect.signature(base.cls.__init__).parameters  # type: ignore[misc]
    shared = {name: value for name, value in transformer.items() if name in _OF_TRANSFORMERS and name in taken}
    try:
        told = layout.told(single.shapes, _completed(base.cls, shared))
    except KeyError as error:
        raise ValueError(f"{single.path} lacks {error.args[0]}. Get the whole ControlNet.") from error
    return _checked(FileComponent(base.name, base.folder, base.cls, base.dtype, {**shared, **told}, single=single))


def encoder_component(base: Component, path: Path) -> FileComponent:
    """Return a text or picture encoder of `base` with the weights of a file. Raises ValueError if it is another's."""
    dtype = base.dtype or type_of(path)

    def structure(of: Component) -> Any:
        with building, on_meta(base.folder / "config.json", base.cls.__name__, [path]):
            return replace(of, dtype=dtype)._structure()

    module = structure(base)
    if reads_text_alone(path, module):
        base = replace(base, cls=without_tower(base.cls), config={**base.config, "_without_tower": True})
        module = structure(base)
    module.tie_weights()
    single = read_encoder(path, module, dtype, TEXT if base.role == "text_encoder" else PICTURE)
    return _checked(FileComponent(base.name, base.folder, base.cls, base.dtype, base.config, single=single))


def _layout_for(base: Component, single: SingleFile) -> Layout:
    assert single.layout is not None
    if base.cls.__name__ not in single.layout.classes:
        raise ValueError(another_model(single, base.folder.parent, base.cls.__name__))
    return single.layout


def another_model(single: SingleFile, base: Path, name: str) -> str:
    """Return what is wrong with a file whose model is not the class `name` of a base."""
    return (
        f"{single.path} is {single.title}, but {base} has {name}. "
        "Give a file of that class, or the folder of the file's own model as base."
    )


def _checked(component: FileComponent) -> FileComponent:
    """Check that the file has weights, before anything else is opened: half a pipeline is none."""
    if not component.stored:
        raise ValueError(f"{component.single.path} holds no weights. Download it again.")
    return component


def _completed(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a config with the defaults of its class, and with values that follow from others."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    completed = {**defaults, **config}
    if completed.get("out_channels", 0) is None:
        completed["out_channels"] = completed.get("in_channels")
    return completed


def _same(one: Any, other: Any) -> bool:
    pair = [list(each) if isinstance(each, tuple) else each for each in (one, other)]
    return bool(pair[0] == pair[1])
