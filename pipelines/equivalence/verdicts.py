"""Prove that a pipeline in stages gives what its stock call gives, before anything is loaded.

A call that is split in three may go wrong without an error: stock code may overwrite embeddings that it is given,
decode more than once, or change what was decoded. So both ways run on echoes of the modules, and have to end alike.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.files import read_json, write_cache
from ...memory.planning.dry_run import StandIns
from ...memory.weights.unit import ManagedModel
from ..stock.postprocess import SOUND_TAILS, TAILS
from .fingerprints import Echo

Modules = Mapping[str, nn.Module]

_CLOSE = 1e-4
_LONGEST_REASON = 200  # characters of somebody else's words
_MOST_KNOWN = 1000


@dataclass(frozen=True)
class Verdict:
    """How the stages differ from the stock call, in a few words, empty where they do not.

    `negative` is the negative prompt that the stock call takes by default, None if it goes without. `left_out` are
    the modules that only the stock call runs, and that have no part in the pictures, as those that make sound.
    `dimensions` are those of the latents that the VAE decodes. `own_size` says that it draws another size than it is
    asked for, such as that of its picture. `tail` names what it does with what its VAE decodes, and `looks` says that
    its VAE encodes something even where it starts from no picture. `needs` are options of `encode` without which the
    stock call fails, or the guider of blocks that fail without guidance, and `stock_failed` says that it did. `sound`
    are the calls that make the sound of its latents, such as "audio_vae.decode", and `sound_tail` names what is done
    with the result of the last. The stages run these, too. `parts` are those of encoders, by name, that blocks call by
    themselves. `draws` says that the decoder draws noise of the run's generator.
    """

    differs: str = ""
    negative: str | None = None
    left_out: tuple[str, ...] = ()
    dimensions: int = 4
    own_size: bool = False
    tail: str = ""
    looks: bool = False
    needs: Mapping[str, Any] = field(default_factory=dict)
    stock_failed: bool = False
    sound: tuple[str, ...] = ()
    sound_tail: str = ""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    draws: bool = False


def echoes_of(units: Sequence[ManagedModel], stand_ins: StandIns, kind: type[Echo] = Echo) -> dict[str, Echo]:
    """Return an echo of each unit, by name."""
    methods = {}
    for unit in units:
        coding = unit.role == "vae" or unit.name.endswith("vae")
        methods[unit.name] = [name for name in ("decode", "encode") if coding and hasattr(unit.module, name)]
    return {unit.name: kind(unit.skeleton, stand_ins, methods[unit.name]) for unit in units}


def compare(
    stock: Callable[[Modules], torch.Tensor], staged: Callable[[Modules], torch.Tensor], echoes: Mapping[str, Echo]
) -> Verdict:
    """Compare the stages with the stock call.

    Both make pictures as `decode` gives them, with the modules that they are given. What they raise is passed on.
    """
    made, calls = _run(stock, echoes)
    made_staged, calls_staged = _run(staged, echoes)
    left_out = tuple(name for name in echoes if calls[name] and not calls_staged[name])
    for name in sorted(echoes, key=lambda name: name == "vae"):  # which comes last
        # More may be asked of an encoder than is used.
        encodes = name.startswith("text_encoder")
        if not encodes and name not in left_out and (found := _differing_calls(name, calls[name], calls_staged[name])):
            return Verdict(found)
    tail = next((name for name, ends in TAILS.items() if close(made, ends(made_staged))), None)
    if tail is None and made.shape != made_staged.shape:
        return Verdict(f"its call returns {_shape(made)}, and its VAE decodes {_shape(made_staged)}")
    if tail is None:
        return Verdict("its call changes what its VAE decodes")
    return Verdict(left_out=left_out, tail=tail)


def close(made: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether what was made with echoes is the same, up to rounding."""
    return made.shape == other.shape and torch.allclose(made, other, atol=_CLOSE, rtol=0)


_known: OrderedDict[str, Verdict] = OrderedDict()


def recall(directory: Path, key: str | None) -> Verdict | None:
    """Return the verdict that was kept for a `key`, or None."""
    verdict = _known.get(key) if key else None
    if verdict is None and key and (verdict := _read(directory / f"{key}.json")):
        _remember(key, verdict)
    return verdict


def keep(directory: Path | None, key: str | None, verdict: Verdict) -> None:
    """Keep a verdict; without a directory in this process only. A disk that cannot be written costs the time again."""
    if key:
        _remember(key, verdict)
    if key and directory:
        write_cache(directory / f"{key}.json", json.dumps(asdict(verdict)).encode())


def not_compared(error: BaseException) -> Verdict:
    """Return the verdict for a comparison that ended with an error."""
    return Verdict(f"it cannot be compared with its own call ({words_of(error)})")


def words_of(error: BaseException) -> str:
    """Return the words of an error in one line, of 200 characters at most."""
    return (" ".join(str(error).split()) or type(error).__name__)[:_LONGEST_REASON]


def _remember(key: str, verdict: Verdict) -> None:
    _known[key] = verdict
    while len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)


def _read(path: Path) -> Verdict | None:
    try:
        facts = read_json(path)
        known = facts["differs"], facts["negative"], tuple(facts["left_out"]), int(facts["dimensions"])
        found = facts["own_size"] is True, str(facts["tail"]), facts["looks"] is True
        sound = {"sound": tuple(facts["sound"]), "sound_tail": facts["sound_tail"]}
        sound |= {"parts": {name: tuple(parts) for name, parts in facts["parts"].items()}}
        sound |= {"draws": facts.get("draws") is True}
        verdict = Verdict(*known, *found, needs=dict(facts["needs"]), **sound)
        _ = TAILS[verdict.tail], SOUND_TAILS[verdict.sound_tail]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    words = (
        verdict.differs,
        verdict.negative or "",
        *verdict.left_out,
        *verdict.sound,
        *sum(verdict.parts.values(), ()),
    )
    return verdict if all(isinstance(word, str) for word in words) else None


def _run(
    way: Callable[[Modules], torch.Tensor], echoes: Mapping[str, Echo]
) -> tuple[torch.Tensor, dict[str, list[tuple[str, float]]]]:
    for echo in echoes.values():
        echo.calls.clear()
    made = way({name: echo.face for name, echo in echoes.items()})
    return made, {name: list(echo.calls) for name, echo in echoes.items()}


def _differing_calls(name: str, stock: Sequence[tuple[str, float]], staged: Sequence[tuple[str, float]]) -> str:
    if len(stock) != len(staged):
        return f"its {name} is called {len(stock)} times, and {len(staged)} times in stages"
    pairs = zip(stock, staged, strict=True)
    same = all(a == b and abs(one - other) < _CLOSE * max(1.0, abs(one)) for (a, one), (b, other) in pairs)
    return "" if same else f"its {name} gets other values in stages"


def _shape(pictures: torch.Tensor) -> str:
    return " x ".join(map(str, pictures.shape[1:-1]))
