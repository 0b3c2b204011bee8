"""Prompt weights as ComfyUI writes them, `(word:1.3)`, for encoders that have a rule for them there.

The brackets leave the prompt before an encoder reads it. Then the states of the words are moved away from those that
the empty prompt has at the same places, or towards them: z = (z - z_empty) * weight + z_empty. Pooled outputs stay.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...memory.weights.interpose import Forward, interpose

PROMPT_WEIGHTS = "prompt_weights"  # the option of `encode`
WEIGHTED = frozenset(
    {"CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel", "UMT5EncoderModel", "BertModel"}
)
_ZEROED = "UMT5EncoderModel"  # ComfyUI clears its states of padding, and those of Cosmos
_BRACKET = 1.1  # the weight of a bracket without a number
_DEEPEST = 100  # brackets in brackets
_SHOWN = 5  # words whose weights are told
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})

Span = tuple[int, int, float]  # first character, the one after the last, weight


@dataclass(frozen=True)
class WeightedPrompt:
    """A prompt without its brackets, and its spans of characters whose weight is not 1."""

    text: str
    spans: tuple[Span, ...] = ()

    @classmethod
    def read(cls, prompt: str) -> WeightedPrompt:
        r"""Return what ComfyUI reads: `(a)` has weight 1.1, `(a:1.3)` has 1.3, `\(` is a bracket.

        Raises ValueError, in one line, for a weight such as `nan`, and for more than 100 brackets in brackets.
        """
        text, spans = "", list[Span]()
        for part, weight in _parts(re.findall(r"\\[()]|.", prompt, re.DOTALL), 1.0):
            start, text = len(text), text + part
            if spans and spans[-1][1:] == (start, weight):
                start = spans.pop()[0]
            if weight != 1 and part:
                spans.append((start, len(text), weight))
        return cls(text, tuple(spans))

    def weight_at(self, index: int) -> float:
        """Return the weight of a character."""
        return next((weight for start, end, weight in self.spans if start <= index < end), 1.0)


def _parts(units: Sequence[str], weight: float, depth: int = 0) -> Iterator[tuple[str, float]]:
    """Yield texts and their weights. A unit is a character, or an escaped bracket."""
    if depth > _DEEPEST:
        raise ValueError(f"a prompt has more than {_DEEPEST} brackets in brackets. Write \\( and \\) for plain ones.")
    items, start, opened = [], 0, 0
    for at, unit in enumerate(units):
        if unit == "(":
            if opened == 0:
                items.append(units[start:at])
                start = at
            opened += 1
        elif unit == ")":
            opened -= 1
            if opened == 0:
                items.append(units[start : at + 1])
                start = at + 1
    for item in (*items, units[start:]):
        if len(item) > 1 and item[0] == "(" and item[-1] == ")":
            yield from _parts(*_bracket(item[1:-1], weight * _BRACKET), depth + 1)
        elif item:
            yield "".join(unit[-1] for unit in item), weight


def _bracket(inside: Sequence[str], weight: float) -> tuple[Sequence[str], float]:
    """Return the content of a bracket and its weight: the number after its last colon, if there is one."""
    colon = max((at for at, unit in enumerate(inside) if unit == ":"), default=0)
    number = "".join(inside[colon + 1 :])
    try:
        found = float(number) if colon else weight
    except ValueError:
        return inside, weight
    if not math.isfinite(found):
        raise ValueError(f"a prompt has the weight {number.strip()}. Write a number, as in (word:1.3).")
    return (inside[:colon] if colon else inside), found


def weights_note(prompts: Sequence[WeightedPrompt]) -> str:
    """Return the note that brackets were read as weights, with the first of them."""
    pairs = dict.fromkeys((p.text[start:end].strip(), weight) for p in prompts for start, end, weight in p.spans)
    words = [f"'{word}' {weight:g}" for word, weight in pairs if word]
    more = ", ..." if len(words) > _SHOWN else ""
    return f"Brackets are weights: {', '.join(words[:_SHOWN])}{more}. Write \\( and \\) for plain ones."


@dataclass(frozen=True)
class _Tokens:
    """A call of a tokenizer: its ids, the weight of each, its prompts, and the ids and mask of the empty prompt."""

    ids: list[list[int]]
    weights: list[list[float]]
    prompts: list[WeightedPrompt | None]
    empty_ids: list[int]
    empty_mask: list[int]


@dataclass
class Weighting:
    """Weights the states that encoders make of these prompts. For each length the empty prompt is encoded once."""

    prompts: Sequence[WeightedPrompt]
    clears_padding: bool = False  # whether states of padding count as zeros
    _seen: list[_Tokens] = field(default_factory=list)
    _empty: dict[Any, Any] = field(default_factory=dict)
    _applied: set[WeightedPrompt] = field(default_factory=set)

    @contextmanager
    def within(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Weight what these encoders answer, until the block ends.

        Raises ValueError, in one line, where a prompt with weights was not found in what they read.
        """
        with ExitStack() as stack:
            for name, module in modules.items():
                stack.callback(interpose(module, partial(self._run, name, type(module).__name__ == _ZEROED)))
            yield
        for prompt in self.prompts:
            if prompt.spans and prompt not in self._applied:
                raise _unplaced(prompt.text)

    def tokenized(self, kind: Any, tokenizer: Any, texts: Sequence[str], named: Mapping[str, Any]) -> None:
        """Note a call of a tokenizer. `kind` is its own class, and `named` are the arguments of the call."""
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{kind.__name__} does not tell where its tokens are. Write \\( and \\) for brackets.")
        plain = {name: value for name, value in named.items() if name not in ("text", "return_tensors")}
        found = kind.__call__(tokenizer, list(texts), **plain, return_offsets_mapping=True)
        ids = [list(row) for row in found["input_ids"]]
        padded = plain | {"padding": "max_length", "truncation": True, "max_length": max(map(len, ids), default=0)}
        empty = kind.__call__(tokenizer, [""], **padded | {"return_attention_mask": True})
        prompts = self._prompts_in(texts)
        weights = [_token_weights(*each) for each in zip(texts, prompts, found["offset_mapping"], strict=True)]
        told = empty["input_ids"][0], empty["attention_mask"][0]
        self._seen.append(_Tokens(ids, weights, prompts, *told))

    def _prompts_in(self, texts: Sequence[str]) -> list[WeightedPrompt | None]:
        """Return the prompt that each text is, or has in it; the longest one."""
        known: dict[str, list[WeightedPrompt]] = {}
        for prompt in self.prompts:
            same = known.setdefault(prompt.text, [])
            same += [prompt]
        longest = sorted(known, key=len, reverse=True)
        words = [
            text if text in known else next((each for each in longest if _alignment(text, each)), None)
            for text in texts
        ]
        found: list[WeightedPrompt | None] = []
        for at, word in enumerate(words):
            same = known[word] if word is not None else []
            if len(set(same)) > 1 and words.count(word) != len(same):
                raise ValueError(f"'{_short(word or '')}' has several weights. Encode these prompts one by one.")
            found.append(same[words[:at].count(word) % len(same)] if same else None)
        return found

    def _run(self, name: str, zeroed: bool, forward: Forward, args: tuple, kwargs: dict) -> Any:
        made = forward(*args, **kwargs)
        ids = args[0] if args else kwargs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise _unplaced(self._words())
        tokens, rows = self._tokens_of(ids)
        key = name, ids.shape[1]
        if key not in self._empty:
            self._empty[key] = _encode_empty(forward, tokens, args, kwargs, zeroed or self.clears_padding)
        weights = torch.tensor(rows, dtype=torch.float32).to(ids.device)[..., None]
        (leaves, structure), empties = tree_flatten(made), self._empty[key]
        moved = [_moved(z, empty, weights) if _is_states(z) else z for z, empty in zip(leaves, empties, strict=True)]
        return tree_unflatten(moved, structure)

    def _words(self) -> str:
        return next((prompt.text for prompt in self.prompts if prompt.spans), "")

    def _tokens_of(self, ids: torch.Tensor) -> tuple[_Tokens, list[list[float]]]:
        """Return the call of a tokenizer that gave these ids, and the weights of all of them."""
        alike = [tokens for tokens in reversed(self._seen) if tokens.ids and len(tokens.ids[0]) == ids.shape[1]]
        try:
            rows = ids.tolist()
        except RuntimeError:  # a dry run has no values of large tensors
            if not alike:
                raise
            self._applied.update(self.prompts)
            return alike[0], [[1.0] * ids.shape[1]] * len(ids)
        for tokens in alike:
            if tokens.ids == rows:
                self._applied.update(prompt for prompt in tokens.prompts if prompt)
                return tokens, tokens.weights
        found = []
        for row in rows:
            if not (having := [tokens for tokens in alike if row in tokens.ids]):
                raise _unplaced(self._words())
            tokens = having[0]
            at = tokens.ids.index(row)
            found.append(tokens.weights[at])
            self._applied.update(prompt for prompt in tokens.prompts[at : at + 1] if prompt)
        return alike[0], found


def _encode_empty(forward: Forward, tokens: _Tokens, args: Sequence, kwargs: Mapping, clears: bool) -> list[Any]:
    """Return the leaves of the encoder's answer to the empty prompt, one row, with the arguments of a call."""
    args, kwargs, masked = list(args), dict(kwargs), False
    for at, (name, row) in enumerate((("input_ids", tokens.empty_ids), ("attention_mask", tokens.empty_mask))):
        given = args[at] if at < len(args) else kwargs.get(name)
        if isinstance(given, torch.Tensor):
            made = torch.tensor([row], dtype=given.dtype).to(given.device)
            masked = name == "attention_mask"
            if at < len(args):
                args[at] = made
            else:
                kwargs[name] = made
    leaves = tree_flatten(forward(*args, **kwargs))[0]
    if not (masked and clears):
        return leaves
    kept = torch.tensor(tokens.empty_mask)[None, :, None]
    return [z * kept.to(z.device, z.dtype) if _is_states(z) else z for z in leaves]


def _is_states(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim == 3


def _moved(z: torch.Tensor, empty: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return states [B,L,C], each moved from the empty prompt's [1,L,C] by its weight [B,L,1], in float32."""
    start = empty.float()
    return torch.where(weights == 1, z, ((z.float() - start) * weights + start).to(z.dtype))


def _token_weights(text: str, prompt: WeightedPrompt | None, offsets: Sequence[tuple[int, int]]) -> list[float]:
    """Return the weights of a text's tokens: that of the last letter of each."""
    places = _alignment(text, prompt.text) if prompt and prompt.spans else {}
    last = [start + len(text[start:end].rstrip()) - 1 for start, end in offsets]
    return [
        prompt.weight_at(places[at]) if prompt and at >= start and at in places else 1.0
        for (start, _), at in zip(offsets, last, strict=True)
    ]


def _alignment(text: str, prompt: str) -> dict[int, int]:
    """Return the places of a prompt's characters by those in a text that has it in it; empty where it has not.

    Pipelines clean prompts: blanks, case, quotes and the width of characters may be others.
    """
    if (start := text.find(prompt)) >= 0:
        return {start + at: at for at in range(len(prompt))}
    (whole, places), (part, own) = _folded(text), _folded(prompt)
    start = whole.find(part) if part else -1
    return dict(zip(places[start : start + len(part)], own, strict=True)) if start >= 0 else {}


def _folded(text: str) -> tuple[str, list[int]]:
    """Return a text without blanks, in lower case and in usual characters, and the place of each in the text."""
    pairs = [
        (folded, at)
        for at, letter in enumerate(text)
        for folded in unicodedata.normalize("NFKC", letter).translate(_QUOTES).lower()
        if not folded.isspace()
    ]
    return "".join(letter for letter, _ in pairs), [at for _, at in pairs]


def _unplaced(text: str) -> ValueError:
    return ValueError(
        f"the weights of '{_short(text)}' cannot be placed: the pipeline rewrites the prompt. "
        "Write \\( and \\) instead."
    )


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
