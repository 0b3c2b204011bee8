"""One LoRA file: its header, which is read once, the notes there, and its tensors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...memory.files import one_line
from ...memory.weights.stored import (
    Stamp,
    check_unchanged,
    file_identity,
    read_header,
    read_metadata,
    read_tensors,
    refuse_pickle,
    stamps_of,
)
from ..files.wrappers import unwrapped
from .names import is_of_text, parsed

Settings = Mapping[str, Mapping[str, Any]]  # by component

_FLOATS = ("F", "BF")
_ENDINGS = (".safetensors", ".sft")
_REFUSED = {
    "dora_scale": "is a DoRA", "lora_magnitude_vector": "is a DoRA", "oft_": "is an OFT", "boft_": "is a BOFT",
    ".a1.weight": "is a GLoRA", ".on_input": "is an IA3",
    ".set_weight": "sets weights", "reshape_weight": "changes shapes of weights",
}  # fmt: skip
_MOST_TENSORS = 100_000
_SETTINGS = "lora_adapter_metadata"  # of diffusers: what peft was set to
_BASES = ("modelspec.architecture", "ss_base_model_version", "base_model")
_TRIGGERS = ("modelspec.trigger_phrase", "trigger_words", "trigger_word", "ss_trigger_words")
_TAGS = "ss_tag_frequency"  # of kohya: by folder of pictures, how many of them have each tag
_MOST_TAGS = 5  # that a note shows
_LONGEST_NOTE = 160  # characters


@dataclass(frozen=True, eq=False)
class LoraFile:
    """A file that holds a LoRA, by its header: the names of its tensors, and its notes."""

    path: Path
    stamp: Stamp
    header: Mapping[str, Any]  # by name of the tensor
    notes: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> LoraFile:
        """Read the header. Raise FileNotFoundError or ValueError, in one line, for a file that is no whole LoRA."""
        if path.suffix.lower() not in _ENDINGS or path.is_dir():
            refuse_pickle(path)
            raise ValueError(f"{path} is no {' or '.join(_ENDINGS)} file. Give the file of a LoRA.")
        header = read_header(path)
        for mark, what in _REFUSED.items():
            if found := next((name for name in header if mark in name), None):
                raise ValueError(f"{path} {what} ({found}), which cannot be run exactly. Get a plain LoRA.")
        if not 0 < len(header) < _MOST_TENSORS or not any(parsed(name) or "lora" in name for name in header):
            raise ValueError(
                f"{path} holds no LoRA{', but ' + next(iter(header)) if header else ''}. Give the file of one."
            )
        return cls(path, stamps_of([path])[0][1], header, read_metadata(path))

    @cached_property
    def digest(self) -> str:
        """A digest that tells the file from any other."""
        return file_identity(self.path)

    @property
    def changes_text(self) -> bool:
        """Whether anything in the file is for a text encoder."""
        return any(is_of_text(unwrapped(name)) for name in self.header)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, on the CPU. Raises ValueError, in one line, for numbers that are no weights."""
        for name, entry in self.header.items():
            is_number = name.endswith("alpha") and prod(entry["shape"]) == 1
            if not (is_number or entry["dtype"].startswith(_FLOATS)):
                raise ValueError(
                    f"{self.path} holds {name} as {entry['dtype']}, and nothing tells what it stands for. "
                    "Get a plain LoRA."
                )
        with one_line(self.path, "read as a LoRA"):
            check_unchanged(self.path, self.stamp)
            tensors = read_tensors([self.path], self.header)
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor.float().sum())):
                raise ValueError(f"{self.path} holds numbers that are not finite, in {name}. Download it again.")
        return {name: tensors[name] for name in self.header}

    @cached_property
    def settings(self) -> Settings:
        """What peft was set to when diffusers saved the file. Raises ValueError, in one line, for damaged notes."""
        settings: dict[str, dict[str, Any]] = {}
        try:
            for name, value in json.loads(self.notes.get(_SETTINGS, "{}")).items():
                component, _, key = name.partition(".")
                settings.setdefault(component, {})[key] = value
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self.path} has damaged notes ({_SETTINGS}) in its header. Download it again."
            ) from error
        if stray := next((name for name in ("r", "lora_alpha", "use_dora", "use_rslora") if name in settings), None):
            raise ValueError(
                f"{self.path} notes {stray} in its header and not of which model. Get the LoRA from elsewhere."
            )
        return settings

    def about(self) -> tuple[str, str]:
        """Return the model that the LoRA was made for, and its trigger words or tags; "" for an unknown one."""
        base = next((self.notes[key] for key in _BASES if self.notes.get(key)), "")
        words = next((self.notes[key] for key in _TRIGGERS if self.notes.get(key)), "")
        return _short(base), _short(words or _frequent(self.notes.get(_TAGS, "")))


def _frequent(told: str) -> str:
    """Return the most frequent tags of the pictures that a LoRA was trained on."""
    counts: Counter[str] = Counter()
    try:
        for tags in json.loads(told or "{}").values():
            counts.update({tag.strip(): count for tag, count in tags.items() if type(count) is int})
    except (ValueError, AttributeError, RecursionError):
        return ""
    return ", ".join(tag for tag, _ in counts.most_common(_MOST_TAGS))


def _short(text: str) -> str:
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(plain.split())[:_LONGEST_NOTE]
