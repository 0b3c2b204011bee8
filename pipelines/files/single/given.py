"""The files that a user gives for parts of a pipeline, the rest of which a base has: a diffusers folder, or ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ..components import Component, names_class
from ..trust import component_class
from .component import FileComponent, another_model, encoder_component, plain_component, transformer_component
from .contents import SingleFile, holds_vae, parts_in, read_part, read_single, type_of
from .encoders import unprojected
from .inside import PARTS
from .processors import PairedProcessor
from .published import comes_with_pack, folders_of, published_folder, usual_encoder
from .spiece import CarriedTokenizer, carries_tokenizer, model_in
from .transformers import LAYOUTS
from .vaes import of_class

_ENCODER, _TRANSFORMER, _SECOND, _VAE = "text_encoder", "transformer", "transformer_2", "vae"
_SEEING = "image_encoder"
_HIGH, _LOW = re.compile("high.?noise", re.IGNORECASE), re.compile("low.?noise", re.IGNORECASE)
_IN_FILES = ("t5", "umt5", "gemma")  # kinds of tokenizers that lie in files of encoders
Maker = Callable[[Component], Component]


@dataclass(frozen=True)
class GivenFiles:
    """Single files: of the transformer and, if given, of the second one, of encoders and of the VAE.

    `tokenizers` are folders by the kind of tokenizer, for a model whose base comes with the pack.
    """

    transformer: Path
    text_encoders: tuple[Path, ...] = ()
    vae: Path | None = None
    transformer_2: Path | None = None
    tokenizers: Mapping[str, Path] = field(default_factory=dict)
    image_encoder: Path | None = None

    def published(self) -> Path:
        """Return the base that ships with the pack. Raises ValueError, in one line, if the transformer has none."""
        return published_folder(_read(self.transformer, None), self.transformer_2 is not None)

    def folders(self, index: Mapping[str, Any]) -> dict[str, Path]:
        """Where parts of the base lie that its folder does not hold. ValueError for a tokenizer that is nowhere."""
        if not comes_with_pack(index):
            return {}
        return folders_of(index, self.transformer, self.tokenizers, _IN_FILES if self._carrying else ())

    @property
    def _carrying(self) -> Path | None:
        """The one encoder's file that has a tokenizer in it as well."""
        found = [path for path in self.text_encoders if carries_tokenizer(path)]
        return found[0] if len(found) == 1 else None

    def components(self, index: Mapping[str, Any]) -> dict[str, Maker]:
        """Return by name a function that gives a component of the base its weights from a file.

        It raises FileNotFoundError, or ValueError in one line, for a file that is damaged, or not of that model. Of the
        encoders' files each encoder takes the first that fits it. A base that comes with the pack has no weights: there
        must be a file for each part.
        """
        parts = index.get("_parts", {})
        makers: dict[str, Maker] = {
            name: partial(_with_settings, settings, None if kind in self.tokenizers else self._carrying)
            for name, (kind, settings) in index.get("_tokenizers", {}).items()
        }
        makers |= {name: partial(_lacking, self.transformer, usual) for name, (_, usual) in parts.items()}
        for name, (_, reader) in index.get("_processors", {}).items():
            kind, settings = index["_tokenizers"][reader]
            cls = component_class(*index[reader])
            if kind in self.tokenizers:
                tokenizer = Component(reader, self.tokenizers[kind], cls, None, dict(settings))
                makers[name] = partial(_reading, tokenizer)
        makers[_TRANSFORMER] = partial(_transformer, self.transformer)
        makers |= {name: partial(_part, self.transformer, name) for name in self._inside if name in index}
        if self.transformer_2:
            makers[_SECOND] = partial(_transformer, self.transformer_2)
        if self.vae:
            makers[_VAE] = partial(_vae, self.vae)
        elif _VAE in parts and holds_vae(self.transformer):
            makers[_VAE] = partial(_vae, self.transformer)
        if self.image_encoder:
            makers[_SEEING] = partial(_image_encoder, self.image_encoder)
        if self.text_encoders:
            named = (name for name, entry in index.items() if names_class(entry) and None not in entry)
            encoders = [name for name in named if name.startswith(_ENCODER)]
            choice = _Choice(self.text_encoders, len(encoders), partial(self._not_chosen, len(encoders), parts))
            makers |= {name: partial(choice.encoder, makers.get(name, _with_weights)) for name in encoders}
        makers |= {name: partial(_unprojected, makers[name]) for name in index.get("_unprojected", ())}
        return makers

    def _not_chosen(self, encoders: int, parts: Mapping[str, Any], base: Component) -> str:
        """Return a sentence that names an encoder's missing file; empty where there are files enough for `encoders`."""
        count = len(set(self.text_encoders))
        if count >= encoders:
            return ""
        title = _read(self.transformer, None).title
        again = count < len(self.text_encoders)
        what = usual_encoder(title, base.name, base.cls.__name__, parts)
        said = "has a file that is chosen already" if again else "is not chosen"
        return f"{_ENCODER}_{count + 1} {said}: {title} needs {what}."

    @cached_property
    def _inside(self) -> list[str]:
        """The names of components that lie in the transformer's file as well."""
        return parts_in(self.transformer, PARTS)

    def check_base(self, folder: Path, index: Mapping[str, Any]) -> None:
        """Raise ValueError, in one line, for a base of another model, before its other parts are asked for."""
        single = _read(self.transformer, None)
        entry: Any = index.get(_TRANSFORMER)
        if names_class(entry) and single.layout and entry[1] not in single.layout.classes:
            raise ValueError(another_model(single, folder, entry[1]))

    def check_read(self, found: Iterable[Component]) -> None:
        """Raise ValueError, in one line, for a file that is no part of the pipeline."""
        parts = list(found)
        read = {part.name: part.single.path for part in parts if isinstance(part, FileComponent)}
        encoders = [part for part in parts if part.is_module and part.role == _ENCODER]
        left = list(self.text_encoders)
        for path in (read[part.name] for part in encoders if part.name in read):
            left.remove(path)
        if left:
            raise ValueError(_fits_none(left[0], [part for part in encoders if part.name not in read]))
        if lost := [name for name in self._inside if name not in read]:
            raise ValueError(
                f"{self.transformer} holds {PARTS[lost[0]].title}, for which the base has no {lost[0]}. Give the "
                "diffusers folder of that model as base."
            )
        if self.transformer_2 == self.transformer:
            raise ValueError(f"{self.transformer} is given as both transformers. Give the other one as transformer_2.")
        if self.transformer_2 and _LOW.search(self.transformer.stem) and _HIGH.search(self.transformer_2.stem):
            raise ValueError(f"{self.transformer} is the model for low noise. Give it as transformer_2.")
        for name, given in ((_VAE, self.vae), (_SECOND, self.transformer_2), (_SEEING, self.image_encoder)):
            if given and name not in read:
                raise ValueError(f"{given} is given as {name}, and the base has none. Leave {name} out.")


def _read(path: Path, base: Component | None) -> SingleFile:
    return read_single(path, LAYOUTS, "transformer", (base and base.dtype) or type_of(path))


def _transformer(path: Path, base: Component) -> Component:
    return transformer_component(base, _read(path, base))


def _image_encoder(path: Path, base: Component) -> Component:
    return encoder_component(base, path)


def _vae(path: Path, base: Component) -> Component:
    layouts = of_class(base.cls.__name__)
    return plain_component(base, read_single(path, layouts, "VAE", base.dtype or type_of(path), base.config))


def _part(path: Path, name: str, base: Component) -> Component:
    return plain_component(base, read_part(path, PARTS[name], base.dtype or type_of(path), base.config))


class _Choice:
    """The files of `encoders` encoders, which are made one after another; `say` tells that one's file is missing."""

    def __init__(self, files: Iterable[Path], encoders: int, say: Callable[[Component], str]) -> None:
        self._left, self._taken, self._ahead, self._say = list(files), set[Path](), encoders, say
        self._missing: tuple[str, Exception] | None = None

    def encoder(self, otherwise: Maker, base: Component) -> Component:
        """Return an encoder with the weights of the first remaining file that fits it, or else the base's.

        ValueError or FileNotFoundError, in one line, where there are none. The last encoder says it of any: by then the
        files that fit no encoder at all are known.
        """
        self._ahead -= 1
        made = self._made(otherwise, base)
        if self._missing and not self._ahead:
            not_chosen, error = self._missing
            strays = not set(self._left) <= self._taken
            raise error if strays else ValueError(not_chosen) from error.__cause__
        return made

    def _made(self, otherwise: Maker, base: Component) -> Component:
        reasons = []
        for path in self._left:
            try:
                made = encoder_component(base, path)
            except ValueError as error:
                reasons.append(str(error))
                continue
            self._left.remove(path)
            self._taken.add(path)
            return made
        try:
            return otherwise(base)
        except (FileNotFoundError, ValueError) as error:
            told: Exception = error
            if reasons:
                told = ValueError(" ".join([f"{error} None of the files given fits it:", *reasons]))
                told.__cause__ = error
            if not (not_chosen := self._say(base)):
                raise told from told.__cause__
            self._missing = self._missing or (not_chosen, told)
            return replace(base, dtype=torch.float32)  # which nobody gets: the last encoder raises


def _with_weights(base: Component) -> Component:
    base.files  # noqa: B018  # which are looked for then
    return base


def _unprojected(make: Maker, base: Component) -> Component:
    """Return an encoder without its projection; its identity differs too."""
    return make(replace(base, cls=unprojected(base.cls), config={**base.config, "_unprojected": True}))


def _with_settings(settings: Mapping[str, Any], carrying: Path | None, base: Component) -> Component:
    """Return a tokenizer with these settings, from its folder, from an encoder's file, or from a file of its own."""
    source = carrying or model_in(base.folder)
    if source is None:
        return replace(base, config=dict(settings))
    return CarriedTokenizer(base.name, base.folder, base.cls, None, dict(settings), source=source)


def _reading(tokenizer: Component, base: Component) -> Component:
    """Return a processor that uses the tokenizer."""
    return PairedProcessor(base.name, base.folder, base.cls, tokenizer=tokenizer)


def _lacking(transformer: Path, usual: str, base: Component) -> Component:
    """Raise ValueError for a part that no file was given for."""
    how = "among text_encoders" if base.role == _ENCODER else f"as {base.name}"
    raise ValueError(
        f"{transformer} needs a file for its {base.name} ({base.cls.__name__}) as well, such as {usual}. "
        f"Give it {how}, or a base that has it: the diffusers folder of that model."
    )


def _fits_none(path: Path, encoders: Iterable[Component]) -> str:
    said = []
    for base in encoders:
        try:
            encoder_component(base, path)
        except ValueError as error:
            said.append(str(error))
    return " ".join([f"{path} fits no text encoder that the base has and no other file is for.", *said])
