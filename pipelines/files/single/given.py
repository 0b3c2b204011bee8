"""The files that a user gives for parts of a pipeline, the rest of which a base has: a diffusers folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..components import Component
from .component import FileComponent, encoder_component, transformer_component, vae_component
from .contents import read_single, type_of
from .transformers import LAYOUTS
from .vaes import VAES

_ENCODER, _TRANSFORMER, _SECOND, _VAE = "text_encoder", "transformer", "transformer_2", "vae"
Maker = Callable[[Component], Component]


@dataclass(frozen=True)
class GivenFiles:
    """Single files: of the transformer and, if given, of the second one, of text encoders and of the VAE."""

    transformer: Path
    text_encoders: tuple[Path, ...] = ()
    vae: Path | None = None
    transformer_2: Path | None = None

    def components(self, index: Mapping[str, Any]) -> dict[str, Maker]:
        """What makes of a component of the base, by its name, the same with its weights from the file given for it.

        It raises FileNotFoundError, or ValueError in one line, for a file that is damaged, or not of that model. Of the
        encoders' files each encoder takes the first that fits it.
        """
        left = list(self.text_encoders)
        makers: dict[str, Maker] = {_TRANSFORMER: partial(_transformer, self.transformer)}
        if self.transformer_2:
            makers[_SECOND] = partial(_transformer, self.transformer_2)
        if self.vae:
            makers[_VAE] = partial(_vae, self.vae)
        if left:
            makers |= {name: partial(_encoder, left) for name in index if name.startswith(_ENCODER)}
        return makers

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
        if self.transformer_2 == self.transformer:
            raise ValueError(f"{self.transformer} is given as both transformers. Give the other one as transformer_2.")
        for name, given in ((_VAE, self.vae), (_SECOND, self.transformer_2)):
            if given and name not in read:
                raise ValueError(f"{given} is given as {name}, and the base has none. Leave {name} out.")


def _transformer(path: Path, base: Component) -> Component:
    single = read_single(path, LAYOUTS, "transformer", base.dtype or type_of(path))
    return transformer_component(base, single)


def _vae(path: Path, base: Component) -> Component:
    return vae_component(base, read_single(path, VAES, "VAE", base.dtype or type_of(path), base.config))


def _encoder(left: list[Path], base: Component) -> Component:
    """An encoder with the weights of the first of the files that fits it, which is taken from them; else the base's."""
    reasons = []
    for path in left:
        try:
            made = encoder_component(base, path)
        except ValueError as error:
            reasons.append(str(error))
            continue
        left.remove(path)
        return made
    try:
        base.files  # noqa: B018  # which are looked for then
    except FileNotFoundError as error:
        raise ValueError(" ".join([f"{error} None of the files given fits it:", *reasons])) from error
    return base


def _fits_none(path: Path, encoders: Iterable[Component]) -> str:
    said = []
    for base in encoders:
        try:
            encoder_component(base, path)
        except ValueError as error:
            said.append(str(error))
    return " ".join([f"{path} fits no text encoder that the base has and no other file is for.", *said])
