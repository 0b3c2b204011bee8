"""Notes for people in the header of a LoRA: the model that it was made for, and its trigger words."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from .lora import check_lora

_BASES = ("modelspec.architecture", "ss_base_model_version", "base_model")
_WORDS = ("modelspec.trigger_phrase", "trigger_words", "trigger_word", "ss_trigger_words")
_TAGS = "ss_tag_frequency"  # of kohya: by folder of pictures, how many of them have each tag
_MOST_TAGS, _LONGEST = 5, 160


def about_lora(path: Path) -> tuple[str, str]:
    """Return the model that a file was made for, and its trigger words or most frequent tags. Unknown ones are "".

    Raises what `check_lora` does.
    """
    from safetensors import safe_open

    check_lora(path)
    with safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
    base = next((notes[key] for key in _BASES if notes.get(key)), "")
    words = next((notes[key] for key in _WORDS if notes.get(key)), "") or _frequent(notes.get(_TAGS, ""))
    return _short(base), _short(words)


def _frequent(told: str) -> str:
    counts: Counter[str] = Counter()
    try:
        for tags in json.loads(told or "{}").values():
            counts.update({tag.strip(): count for tag, count in tags.items() if type(count) is int})
    except (ValueError, AttributeError, RecursionError):
        return ""
    return ", ".join(tag for tag, _ in counts.most_common(_MOST_TAGS))


def _short(text: str) -> str:
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(plain.split())[:_LONGEST]
