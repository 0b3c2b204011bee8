"""Prompts and negative prompts: one or several, and whether the negative one has an effect."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .prompt_weights import WeightedPrompt

Prompt = str | Sequence[str]
Negative = Prompt | None  # None for what the stock pipeline takes by default
COUNTS = "Above 1 it counts, and each step runs twice."
TOLD: set[str] = set()  # notes that were shown or logged in this process
_HALF = re.compile("[\ud800-\udfff]")  # each is one of a pair that stands for a character


def as_plain(prompt: Prompt | None) -> str | list[str] | None:
    """Return a prompt as JSON and stock calls take it."""
    return prompt if prompt is None or isinstance(prompt, str) else list(prompt)


def as_list(prompt: Prompt | None) -> list[str]:
    """Return the prompts as a list, empty for None."""
    if prompt is None:
        return []
    return [prompt] if isinstance(prompt, str) else list(prompt)


def check_text(prompt: Prompt, negative_prompt: Negative = None) -> None:
    """Raise ValueError, in one line, for what is no text and no list of texts, or has half of a character in it."""
    for name, given in (("prompt", prompt), ("negative_prompt", "" if negative_prompt is None else negative_prompt)):
        texts = as_list(given) if isinstance(given, str | list | tuple) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name} is {str(given)[:80]!r}; it takes a text, or a list of them.")
        for text in texts:
            if half := _HALF.search(text):
                point = ord(half[0])
                raise ValueError(f"a prompt has half of a character in it, U+{point:04X}. Write that place anew.")


def match_negatives(prompt: Prompt, negative_prompt: Negative) -> Negative:
    """One negative prompt for each prompt; a single one serves all. Raises ValueError for another number of them."""
    if negative_prompt is None:
        return None
    if isinstance(prompt, str) and isinstance(negative_prompt, str):
        return negative_prompt
    count, negatives = len(as_list(prompt)), as_list(negative_prompt)
    if len(negatives) not in (1, count):
        raise ValueError(f"there are {count} prompts and {len(negatives)} negative ones. Give one, or as many.")
    return negatives if len(negatives) == count else negatives * count


def no_effect(scale: float, by_default: bool) -> str:
    """Return the note that guidance of this scale ignores the negative prompt."""
    return f"The negative prompt has no effect: guidance is {scale:g}{' by default' * by_default}. {COUNTS}"


@dataclass(frozen=True)
class Text:
    """A prompt pair to encode, with options of the model's `encode`.

    `weighted` are all its prompts where any of them has weights, which these texts are without.
    """

    prompt: Prompt
    negative_prompt: Negative
    options: dict[str, Any] = field(default_factory=dict)
    weighted: tuple[WeightedPrompt, ...] = ()
