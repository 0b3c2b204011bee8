"""Tokenizers of SentencePiece that lie in the file of their encoder, as ComfyUI's files and GGUF of UMT5 have them.

Only of the unigram kind, which T5 and UMT5 have. In safetensors the bytes are those of a `spiece.model`: a protocol
buffer, of which the few fields that tokenizing needs are read here. GGUF has the same as facts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....memory.files import one_line
from ....memory.units.gguf import read_gguf_arrays, read_gguf_header
from ....memory.units.weights import file_identity, read_header, read_tensors, refuse_pickle
from ..components import Component

_BLOB = "spiece_model"
_GGUF = "tokenizer.ggml"
_UNIGRAM = 1
_UNKNOWN, _BYTE = 2, 6  # kinds of pieces
_MAX_BYTES, _MAX_PIECES = 64 * 2**20, 1_000_000
# Kinds of fields: a number, eight bytes, a length and so many bytes, four bytes.
_NUMBER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


@dataclass(frozen=True)
class Spiece:
    """What a SentencePiece model says: pieces with their scores, and how text is made even before."""

    pieces: list[tuple[str, float]]
    unknown: int
    charsmap: bytes
    byte_fallback: bool


@dataclass(frozen=True)
class CarriedTokenizer(Component):
    """A tokenizer that lies in the file of its encoder. `config` is what it is set to."""

    source: Path = None  # type: ignore[assignment]  # it follows fields that have defaults

    def create(self) -> Any:
        """The tokenizer. ValueError, in one line, for bytes that are none."""
        from transformers import PreTrainedTokenizerFast

        with one_line(self.source, "read as a file with a tokenizer"):
            made = tokenizer_of(_spiece_in(self.source))
        tokens = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        return PreTrainedTokenizerFast(tokenizer_object=made, **tokens, **self.config)

    def identity(self) -> list[str]:
        """Digests of the file and the settings, for cache keys."""
        return [file_identity(self.source), json.dumps(self.config, sort_keys=True)]


def carries_tokenizer(path: Path) -> bool:
    """Whether the file of an encoder has a SentencePiece tokenizer beside the weights. ValueError for a damaged one."""
    refuse_pickle(path)
    if path.suffix.lower() == ".gguf":
        return read_gguf_header(path).facts.get(f"{_GGUF}.model") == "t5"
    return _BLOB in read_header(path)


def _spiece_in(path: Path) -> Spiece:
    if path.suffix.lower() != ".gguf":
        return read_spiece(bytes(read_tensors([path], [_BLOB])[_BLOB].numpy()))
    names = ("tokens", "scores", "token_type", "precompiled_charsmap")
    found: Mapping[str, Sequence[Any]] = read_gguf_arrays(path, [f"{_GGUF}.{name}" for name in names])
    texts, scores, kinds, charsmap = (list(found.get(f"{_GGUF}.{name}", ())) for name in names)
    if not len(texts) == len(scores) == len(kinds) or kinds.count(_UNKNOWN) != 1 or None in texts:
        raise ValueError("its tokens, their scores and their kinds do not belong together")
    pieces = [(str(text), float(score or 0)) for text, score in zip(texts, scores, strict=True)]
    flat = bytes(int(value or 0) & 0xFF for value in charsmap)
    return Spiece(pieces, kinds.index(_UNKNOWN), flat, _BYTE in kinds)


def read_spiece(blob: bytes) -> Spiece:
    """The model in the bytes of a `spiece.model`. ValueError for damaged ones, and for other kinds than unigram."""
    if len(blob) > _MAX_BYTES:
        raise ValueError(f"it has {len(blob)} bytes, which no tokenizer has")
    pieces: list[tuple[str, float]] = []
    kind, unknown, byte_fallback, charsmap = _UNIGRAM, 0, False, b""
    for number, value in _fields(blob):
        if number == 1:
            own = dict(_fields(value))
            pieces.append((own.get(1, b"").decode(), struct.unpack("<f", own.get(2, bytes(4)))[0]))
            if len(pieces) > _MAX_PIECES:
                raise ValueError("it has more pieces than any tokenizer")
        elif number == 2:
            trainer = dict(_fields(value))
            kind, unknown, byte_fallback = trainer.get(3, _UNIGRAM), trainer.get(40, 0), bool(trainer.get(35, 0))
        elif number == 3:
            charsmap = dict(_fields(value)).get(2, b"")
    if kind != _UNIGRAM or not unknown < len(pieces):
        raise ValueError("it is no unigram model, such as T5 has")
    return Spiece(pieces, unknown, charsmap, byte_fallback)


def tokenizer_of(model: Spiece) -> Any:
    """A `tokenizers.Tokenizer` that gives the numbers of SentencePiece, and </s> behind them."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import Unigram

    made = Tokenizer(Unigram(model.pieces, model.unknown, model.byte_fallback))
    even: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    made.normalizer = normalizers.Sequence([*even, normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    end = made.token_to_id("</s>")
    if end is None:
        raise ValueError("it has no </s>, as T5 has")
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return made


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers as int, all else as bytes."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        number, kind = key >> 3, key & 7
        if kind == _NUMBER:
            value, at = _number(message, at)
            yield number, value
            continue
        size = {_EIGHT: 8, _FOUR: 4}.get(kind, -1)
        if kind == _BYTES:
            size, at = _number(message, at)
        if not 0 <= size <= len(message) - at:
            raise ValueError("it is damaged")
        yield number, message[at : at + size]
        at += size


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = 0
    for i, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * i)
        if not byte & 0x80:
            return value, at + i + 1
    raise ValueError("it is damaged")
