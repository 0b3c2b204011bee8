"""Encoders in single files: transformers' names, with or without the prefixes that tools leave out or put before.

The weights of one are found by what is left of both names without those prefixes. Files often hold more than an encoder
does: a head, a tower for pictures, a tokenizer; those of an encoder of pictures a projection, or one of texts. That is
not read.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ....memory.weights.encoded import encoded_weights
from ....memory.weights.gguf_file import is_gguf
from ....memory.weights.stored import refuse_pickle
from ..rows import whole
from .contents import SingleFile
from .gguf_names import architecture_of, names_in_gguf, rows_in_gguf, weight_in_gguf
from .layouts import Shapes

log = logging.getLogger("ballast")
_TOWER = "visual."
_OF_PICTURES = "vision_tower."
_TOWERS = re.compile(r"^(?:vision_tower\.(?:vision_model\.)?|vision_model\.)")
_GET = "Get the file of that encoder."
_GET_SEEING = "It reads text alone: get a safetensors file that has the tower for pictures, too."


@dataclass(frozen=True)
class Kind:
    """A kind of encoders: the prefixes of their names, and what they do without, by the beginnings of plain names."""

    prefix: re.Pattern[str]
    unread: tuple[str, ...]
    towered: bool = False  # whether it may see pictures, too, by a tower whose names are told in several ways

    def plain(self, name: str) -> str:
        """Strip from a name the prefixes of the models around the encoder."""
        match = self.prefix.match(name)
        plain = name[match.end() :] if match else name
        return _TOWERS.sub(_OF_PICTURES, plain) if self.towered else plain


TEXT = Kind(
    re.compile(r"(?:(?:text_encoders?(?:\.\w+)?|transformer|model|language_model|text_model)\.)*"),
    (
        "lm_head.", "logit_scale", "text_projection.", "visual.", "vision_model.", "visual_projection.", "decoder.",
        "multi_modal_projector.", "embeddings.position_ids", "rotary_emb.", "rope_freqs.", "spiece_model",
        "tokenizer_json", "vision_tower.",
    ),
    towered=True,
)  # fmt: skip
PICTURE = Kind(
    re.compile(r"(?:(?:image_encoder|clip_vision|model)\.)*(?:vision_model\.)?"),
    ("visual_projection.", "text_model.", "text_projection.", "logit_scale", "embeddings.position_ids"),
)


@functools.cache
def unprojected(cls: type) -> type:
    """Return the class of a CLIP encoder without its projection.

    Stable Diffusion 3 takes what CLIP-L says as it is; diffusers, which projects it, has ones in the diagonal there.
    """

    def init(self: Any, config: Any) -> None:
        cls.__init__(self, config)  # type: ignore[misc]
        self.text_projection = nn.Identity()

    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})


class _NoTower(nn.Module):
    def forward(self, *given: Any, **named: Any) -> NoReturn:
        raise ValueError("the text encoder's file has no tower for pictures. Get one that has, or leave pictures out.")


@functools.cache
def without_tower(cls: type) -> type:
    """Return the class of an encoder without the tower that sees pictures, which reads texts as before."""

    def init(self: Any, config: Any) -> None:
        cls.__init__(self, config)  # type: ignore[misc]
        self.model.vision_tower = self.model.multi_modal_projector = _NoTower()

    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})


def reads_text_alone(path: Path, module: nn.Module) -> bool:
    """Return whether an encoder has a tower for pictures, which some pipelines never ask, and its file has none.

    Raises FileNotFoundError, or ValueError in one line, for a damaged file.
    """
    if not any(TEXT.plain(name).startswith(_OF_PICTURES) for name, _ in module.named_parameters()):
        return False
    refuse_pickle(path)
    return not any(_OF_PICTURES in TEXT.plain(name) for name in encoded_weights(path, torch.bfloat16))


def read_encoder(path: Path, module: nn.Module, dtype: torch.dtype, kind: Kind = TEXT) -> SingleFile:
    """Where the weights of an encoder, on `meta`, lie in a file. Reads none. `dtype` is what quantised ones become.

    FileNotFoundError, or ValueError in one line, for a file that is damaged, or that is another encoder's.
    """
    refuse_pickle(path)
    weights, what = dict(encoded_weights(path, dtype)), type(module).__name__
    aliases_of = _names(module)
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    own = {kind.plain(alias) for aliases in aliases_of.values() for alias in aliases}
    named, architecture = _without_prefix(weights, own), ""
    if is_gguf(path) and not any(".0." in name and kind.plain(name) in own for name in named.values()):
        architecture = architecture_of(path, getattr(config, "model_type", ""))
        named = names_in_gguf(architecture, weights)
    by_name: dict[str, str] = {}
    for full, name in named.items():
        if (other := by_name.setdefault(kind.plain(name), full)) != full:
            raise ValueError(f"{path} holds both {other} and {full}: it is of several models. Get the encoder alone.")
    places, taken = {}, set()
    lying = {
        name: [by_name[plain] for alias in aliases if (plain := kind.plain(alias)) in by_name]
        for name, aliases in aliases_of.items()
    }
    if missing := [kind.plain(name) for name, found in lying.items() if not found]:
        get = _GET_SEEING if all(name.startswith(_TOWER) for name in missing) else _GET
        raise ValueError(f"{path} lacks {missing[0]}, which {what} has. {get}")
    for name, found in lying.items():
        try:
            weights[found[0]] = weight_in_gguf(architecture, name, weights[found[0]])
            places[name] = rows_in_gguf(architecture, name, whole(found[0], weights[found[0]].codec.shape), config)
        except ValueError as error:
            raise ValueError(f"{path} has {found[0]} of {error}. {_GET}") from error
        taken.update(found)  # of tied weights the first is read, as transformers does
    left = sorted(name for name, full in by_name.items() if full not in taken)
    if surplus := [by_name[name] for name in left if not name.startswith(kind.unread)]:
        raise ValueError(
            f"{path} holds {len(surplus)} weights that {what} has no place for, such as {surplus[0]}. {_GET}"
        )
    if left:
        log.info("Ballast: of %s only the %s is read, not %s", path, what, _kinds(left))
    return SingleFile(path, what, places, weights, Shapes({name: at.shape for name, at in places.items()}))


def _without_prefix(names: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Return the names of a file without the prefix that it has for this encoder, as far as each begins with it.

    The longest of the encoder's `own` names that ends just one of the file's tells the prefix.
    """
    for name in sorted(own, key=lambda name: (-len(name), name)):
        found = [full for full in names if full == name or full.endswith(f".{name}")]
        if len(found) == 1:
            prefix = found[0].removesuffix(name).split(".")
            return {full: _beyond(prefix, full) for full in names}
    return {full: full for full in names}


def _beyond(prefix: Sequence[str], name: str) -> str:
    parts = name.split(".")
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prefix, parts[:-1], strict=False))
    return ".".join(parts[len(list(same)) :])


def _names(module: nn.Module) -> Mapping[str, Sequence[str]]:
    """Map the first name of each parameter to all its names; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _kinds(names: Sequence[str]) -> str:
    return ", ".join(sorted({name.partition(".")[0] for name in names}))
