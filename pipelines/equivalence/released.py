"""Verdicts that come with the pack, for published models of the released diffusers, so that nobody waits for a proof.

`released.json` maps a key to a verdict. The key is a digest of all that a comparison sees: the code of the classes, the
configs of their parts, and the pictures of the task. A file that was edited, another diffusers or another config has
another key, and is compared when it is opened.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory.files import read_json
from ..files.keys import key_text
from .verdicts import Verdict

if TYPE_CHECKING:
    from ..files.components import Component
    from ..models.diffusers.diffusers_model import DiffusersModel

TABLE = Path(__file__).parent / "released.json"
# What the shapes of an encoder's answers depend on, by the names that transformers has for them in every config.
_OF_ENCODERS = ("hidden_size", "num_hidden_layers", "max_position_embeddings", "projection_dim")


def recall(model: DiffusersModel, texts: DiffusersModel, kind: str, task: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict on a model whose prompt `texts` encodes, or None for one that is not in the table.

    `kind` is "stages", "batch" or "cut", for which `task` says what was compared.
    """
    try:
        facts = _table().get(key_of(model, texts, kind, task))
    except Exception:  # of a config that cannot be read, of which its part says more when it is made
        return None
    if facts is None:
        return None
    return Verdict(**{**facts, **{name: tuple(facts.get(name, ())) for name in ("left_out", "sound")}})


def key_of(model: DiffusersModel, texts: DiffusersModel, kind: str, task: Mapping[str, Any]) -> str:
    """Return the key of a comparison."""
    import diffusers

    classes = model.pipeline_class, texts.pipeline_class
    taken = inspect.signature(model.pipeline_class).parameters
    facts = {
        "kind": kind,
        "task": task,
        "diffusers": diffusers.__version__,
        "config": model.parts.config,
        "classes": [cls.__name__ for cls in classes],
        "code": [_code(cls) for cls in classes],
        # A class may run without the ControlNets beside it.
        "parts": {n: _facts_of(model, part) for n, part in model.components.items() if model.controls or n in taken},
    }
    return hashlib.sha256(key_text(facts, str).encode()).hexdigest()[:32]


def entry(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as the table has it: what is not as by default."""
    plain = {field.name: getattr(Verdict(), field.name) for field in fields(Verdict)}
    return {name: value for name, value in asdict(verdict).items() if value != plain[name]}


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    table: Mapping[str, Mapping[str, Any]] = read_json(TABLE)
    return table


@functools.cache
def _code(cls: type) -> str:
    """Return a digest of the files that a class of diffusers and its bases there are written in."""
    files = {inspect.getfile(base) for base in cls.__mro__ if base.__module__.startswith("diffusers.")}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _facts_of(model: DiffusersModel, part: Component) -> list[Any]:
    """Return the class of a part and its config, with the values that it has by default."""
    from diffusers.configuration_utils import ConfigMixin

    if not part.is_module:
        kind = "" if part.name.startswith("tokenizer") else part.cls.__name__
        return [kind, dict(model.parts.tool(part.name).config) if part.name == "scheduler" else {}]
    config: dict[str, Any]
    if issubclass(part.cls, ConfigMixin):
        config = {**_defaults(part.cls), **part.config}
    else:
        read = part.cls.config_class.from_dict(dict(part.config)).get_text_config()  # type: ignore[attr-defined]
        config = {name: getattr(read, name, None) for name in _OF_ENCODERS}
    return [part.cls.__name__, _code(part.cls), config]


def _defaults(cls: type) -> dict[str, Any]:
    taken = inspect.signature(cls).parameters.values()
    return {each.name: each.default for each in taken if each.default is not inspect.Parameter.empty}
