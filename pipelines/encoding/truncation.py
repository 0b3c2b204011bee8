"""Watch the tokenizers: where they cut a prompt, and which of its words they do not know.

Pipelines cut a prompt at 77 or 256 tokens within their own code, so the tokenizers are listened to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .prompt_weights import Weighting

_LAST_WORDS = 5  # to show where a prompt is cut
_SOME = 5  # unknown words that are named
_WORD = re.compile(r"[^\W\d_]+")
_CLASS = re.compile(r"(?:Text|Encoder|Model|PreTrained|For[A-Z]\w+|With[A-Z]\w+)+$")


@dataclass(frozen=True)
class Reading:
    """The part of a text that an encoder kept: `kept` of `given` tokens, and the last words of these."""

    encoder: str
    text: str
    kept: int
    given: int
    last_words: str


class Truncation:
    """Notes the texts that tokenizers get. A text that an encoder reads again, after an error, counts once."""

    def __init__(self) -> None:
        self._readings: dict[tuple[str, str], Reading] = {}
        self._tokenizers: dict[str, Any] = {}  # by the encoder's title, each as it was before it was listened to
        self.weighting: Weighting | None = None  # is told of the calls, too

    def start(self) -> None:
        """Forget what was read for earlier prompts."""
        self._readings.clear()

    def attach(self, tokenizer: Any, encoder: str) -> Any:
        """Watch the tokenizer of an encoder from now on, and return it."""
        kind: Any = type(tokenizer)
        watch = self

        def listened(self: Any, *given: Any, **named: Any) -> Any:
            found = kind.__call__(self, *given, **named)
            text = named["text"] if "text" in named else next(iter(given), None)
            texts = [text] if isinstance(text, str) else text
            if named.get("truncation"):
                watch._hear(kind, self, encoder, texts, found, named)
            if watch.weighting is not None and isinstance(texts, Sequence):
                watch.weighting.tokenized(kind, self, texts, named)
            return found

        namespace = {"__call__": listened, "__module__": kind.__module__}
        object.__setattr__(tokenizer, "__class__", type(kind.__name__, (kind,), namespace))  # ours may be frozen
        self._tokenizers[encoder] = kind, tokenizer
        return tokenizer

    def _hear(self, kind: Any, tokenizer: Any, encoder: str, texts: Any, found: Any, named: dict[str, Any]) -> None:
        most = named.get("max_length") or getattr(tokenizer, "model_max_length", None)
        if most is None or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            return
        for text, ids in zip(texts, _uncut(kind, tokenizer, texts, named.get("images")), strict=True):
            kept, last = min(len(ids), int(most)), ""
            if kept < len(ids):
                row = found["input_ids"][list(texts).index(text)]
                words = tokenizer.decode(row, skip_special_tokens=True).split()
                last = " ".join(words[-_LAST_WORDS:])
            self._readings[encoder, text] = Reading(encoder, text, kept, len(ids), last)

    def notes(self, title: str, prompts: Sequence[str], negatives: Sequence[str], knows: str) -> list[str]:
        """Return what a user of the model `title` should know of how the prompts were read, a sentence each.

        `knows` says what words it knows.
        """
        named = [("prompt", prompts), ("negative prompt", negatives)]
        found = []
        for name, texts in named:
            for number, text in enumerate(texts, 1):
                if text.strip():
                    label = f"{name.capitalize()} {number}" if len(texts) > 1 else f"The {name}"
                    found += self._cut(label, text, [other for other in (*prompts, *negatives) if other != text])
        return found + self._unknown(title, prompts, knows)

    def _cut(self, label: str, text: str, others: Sequence[str]) -> list[str]:
        # Most families put words around a prompt; one prompt may be part of another.
        around = [reading for reading in self._readings.values() if text.strip() in reading.text]
        around = [r for r in around if not any(len(o) > len(text) and o.strip() in r.text for o in others)]
        ways: dict[tuple[int, int, str], list[str]] = {}
        for reading in around:
            if reading.kept < reading.given:
                readers = ways.setdefault((reading.kept, reading.given, reading.last_words), [])
                readers += [reading.encoder] if reading.encoder not in readers else []
        if not ways:
            return []
        parts = [
            f"{' and '.join(readers)} {'reads' if len(readers) == 1 else 'read'} {kept} of {given} tokens, up to "
            f"'... {last}'"
            for (kept, given, last), readers in ways.items()
        ]
        whole = dict.fromkeys(r.encoder for r in around if r.kept == r.given)
        parts += [f"{encoder} reads all of it" for encoder in whole]
        return [f"{label} is cut: {'; '.join(parts)}."]

    def _unknown(self, title: str, prompts: Sequence[str], knows: str) -> list[str]:
        words = list(dict.fromkeys(word for prompt in prompts for word in _WORD.findall(prompt)))
        found = []
        for encoder, (kind, tokenizer) in self._tokenizers.items() if words else ():
            unknown_id = getattr(tokenizer, "unk_token_id", None)
            if unknown_id is None:
                continue
            rows = kind.__call__(tokenizer, text=words, add_special_tokens=False, verbose=False)["input_ids"]
            reader = encoder if len(self._tokenizers) > 1 else title
            strange = [word for word, row in zip(words, rows, strict=True) if unknown_id in row]
            if len(strange) == len(words):
                found.append(f"{reader} knows none of the prompt's words. {knows}".strip())
            elif strange:
                more = ", ..." if len(strange) > _SOME else ""
                found.append(f"{reader} does not know: {', '.join(strange[:_SOME])}{more}. {knows}".strip())
        return found


def _uncut(kind: Any, tokenizer: Any, texts: Sequence[str], pictures: Any = None) -> list[list[int]]:
    if hasattr(tokenizer, "uncut"):  # ours
        return tokenizer.uncut(texts)
    seen = {} if pictures is None else {"images": pictures}  # by a processor, whose text has a place for each
    whole = kind.__call__(tokenizer, text=list(texts), truncation=False, padding=False, verbose=False, **seen)
    return whole["input_ids"]


def encoder_title(kind: type) -> str:
    """Return the common name of a text encoder's class: CLIP, T5, Gemma2."""
    return _CLASS.sub("", kind.__name__) or kind.__name__
