"""Tokenizers of SentencePiece, as ComfyUI's files and GGUF have them beside the weights of an encoder.

Of the unigram kind, which T5 and UMT5 have, and of that which merges pairs, which Gemma and Pile-T5 have. In
safetensors, and in a file of its own, the bytes are those of a `spiece.model`: a protocol buffer, of which the few
fields that tokenizing needs are read here. GGUF has the same as facts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....memory.files import one_line
from ....memory.weights.gguf_file import is_gguf, read_gguf_arrays, read_gguf_header
from ....memory.weights.stored import file_identity, read_header, read_tensors, refuse_pickle
from ..components import Component
from ..keys import key_text

_BLOB = "spiece_model"
_GGUF = "tokenizer.ggml"
_MODELS = (".model",)  # of a tokenizer alone
_UNIGRAM, _PAIRS = 1, 2
_IN_GGUF = {"t5": _UNIGRAM, "llama": _PAIRS}
_UNKNOWN, _CONTROL, _OWN, _BYTE = 2, 3, 4, 6  # kinds of pieces; what users define stays whole
_BLANK = "\u2581"
_MAX_BYTES, _MAX_PIECES = 64 * 2**20, 1_000_000
# What tokens are called, by their kind.
_NAMED = {
    "bos_token": ("<bos>", "<s>"),
    "eos_token": ("<eos>", "</s>"),
    "unk_token": ("<unk>",),
    "pad_token": ("<pad>", "<s>"),
}
# Kinds of fields: a number, eight bytes, a length and so many bytes, four bytes.
_NUMBER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


@dataclass(frozen=True)
class Spiece:
    """A SentencePiece model: pieces with their scores and kinds, and how text is normalized before.

    With `pairs` the pieces are what pairs are merged into, the best first. Text is `squeezed` where runs of blanks
    count as one, and `prefixed` where one comes before.
    """

    pieces: list[tuple[str, float]]
    kinds: list[int]
    unknown: int
    charsmap: bytes
    byte_fallback: bool
    pairs: bool = False
    squeezed: bool = True
    prefixed: bool = True


@dataclass(frozen=True)
class CarriedTokenizer(Component):
    """A tokenizer that lies in the file of its encoder, or in one of its own. `config` is what it is set to."""

    source: Path = None  # type: ignore[assignment]  # it follows fields that have defaults

    def create(self) -> Any:
        """Create the tokenizer. Raises ValueError, in one line, for bytes that are none."""
        from transformers import PreTrainedTokenizerFast

        with one_line(self.source, "read as a file with a tokenizer"):
            made = tokenizer_of(_spiece_in(self.source))
        known = {key: [text for text in texts if made.token_to_id(text) is not None] for key, texts in _NAMED.items()}
        tokens = {key: texts[0] for key, texts in known.items() if texts}
        return PreTrainedTokenizerFast(tokenizer_object=made, **{"pad_token": "<pad>", **tokens, **self.config})

    def identity(self) -> list[str]:
        """Digests of the file and the settings, for cache keys."""
        return [file_identity(self.source), key_text(self.config)]


def carries_tokenizer(path: Path) -> bool:
    """Return whether an encoder's file has a SentencePiece tokenizer too. ValueError for a damaged one."""
    refuse_pickle(path)
    if is_gguf(path):
        return read_gguf_header(path).facts.get(f"{_GGUF}.model") in _IN_GGUF
    return _BLOB in read_header(path)


def model_in(folder: Path) -> Path | None:
    """Return a tokenizer folder's SentencePiece model, or None if transformers can read the folder itself."""
    if (folder / "tokenizer.json").exists():
        return None
    return next((path for path in sorted(folder.iterdir()) if path.suffix in _MODELS), None)


def _spiece_in(path: Path) -> Spiece:
    if path.suffix in _MODELS:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes, which no tokenizer has")
        return read_spiece(path.read_bytes())
    if not is_gguf(path):
        return read_spiece(bytes(read_tensors([path], [_BLOB])[_BLOB].numpy()))
    names = ("tokens", "scores", "token_type", "precompiled_charsmap")
    found: Mapping[str, Sequence[Any]] = read_gguf_arrays(path, [f"{_GGUF}.{name}" for name in names])
    texts, scores, kinds, charsmap = (list(found.get(f"{_GGUF}.{name}", ())) for name in names)
    if not len(texts) == len(scores) == len(kinds) or kinds.count(_UNKNOWN) != 1 or None in texts:
        raise ValueError("its tokens, their scores and their kinds do not belong together")
    pieces = [(str(text), float(score or 0)) for text, score in zip(texts, scores, strict=True)]
    flat = bytes(int(value or 0) & 0xFF for value in charsmap)
    facts = read_gguf_header(path).facts
    pairs = _IN_GGUF[str(facts[f"{_GGUF}.model"])] == _PAIRS
    prefixed = bool(facts.get(f"{_GGUF}.add_space_prefix", True))
    told = [int(kind or 0) for kind in kinds]
    return Spiece(pieces, told, kinds.index(_UNKNOWN), flat, _BYTE in kinds, pairs, not pairs, prefixed)


def read_spiece(blob: bytes) -> Spiece:
    """Parse the bytes of a `spiece.model`. Raises ValueError for damaged bytes and unknown kinds."""
    if len(blob) > _MAX_BYTES:
        raise ValueError(f"it has {len(blob)} bytes, which no tokenizer has")
    pieces: list[tuple[str, float]] = []
    kinds: list[int] = []
    kind, unknown, byte_fallback, charsmap, prefixed, squeezed = _UNIGRAM, 0, False, b"", True, True
    for number, value in _fields(blob):
        if number == 1:
            own = dict(_fields(value))
            pieces.append((own.get(1, b"").decode(), struct.unpack("<f", own.get(2, bytes(4)))[0]))
            kinds.append(own.get(3, 1))
            if len(pieces) > _MAX_PIECES:
                raise ValueError("it has more pieces than any tokenizer")
        elif number == 2:
            trainer = dict(_fields(value))
            kind, unknown, byte_fallback = trainer.get(3, _UNIGRAM), trainer.get(40, 0), bool(trainer.get(35, 0))
        elif number == 3:
            evening = dict(_fields(value))
            charsmap = evening.get(2, b"")
            prefixed, squeezed = (bool(evening.get(number, 1)) for number in (3, 4))
    if kind not in (_UNIGRAM, _PAIRS) or not unknown < len(pieces):
        raise ValueError("it is no unigram model, such as T5 has, and none of pairs, such as Gemma has")
    return Spiece(pieces, kinds, unknown, charsmap, byte_fallback, kind == _PAIRS, squeezed, prefixed)


def tokenizer_of(model: Spiece) -> Any:
    """Return a `tokenizers.Tokenizer` with SentencePiece's ids, and <bos> before them or </s> after them."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import Unigram

    even: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.squeezed:
        even += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    if model.pairs:
        made = _of_pairs(model, even)
    else:
        made = Tokenizer(Unigram(model.pieces, model.unknown, model.byte_fallback))
        made.normalizer = normalizers.Sequence(even)
        made.pre_tokenizer = pre_tokenizers.Metaspace(_BLANK, prepend_scheme="always")
    for special, template in (("<bos>", "<bos> $A"), ("</s>", "$A </s>")):
        if (number := made.token_to_id(special)) is not None:
            made.post_processor = processors.TemplateProcessing(single=template, special_tokens=[(special, number)])
            return made
    raise ValueError("it has neither </s>, as T5 has, nor <bos>, as Gemma has")


def _of_pairs(model: Spiece, even: list[Any]) -> Any:
    """Build a tokenizer that merges pieces in the order of their scores, but never user-defined ones."""
    from tokenizers import AddedToken, Tokenizer, normalizers
    from tokenizers.models import BPE

    numbers = {text: number for number, (text, _) in enumerate(model.pieces)}
    merges: list[tuple[float, int, int]] = []
    for (text, score), kind in zip(model.pieces, model.kinds, strict=True):
        if kind not in (_CONTROL, _UNKNOWN, _BYTE):
            halves = ((numbers.get(text[:at]), numbers.get(text[at:])) for at in range(1, len(text)))
            merges += [(-score, one, other) for one, other in halves if one is not None and other is not None]
    pairs = [(model.pieces[one][0], model.pieces[other][0]) for _, one, other in sorted(merges)]
    unknown = model.pieces[model.unknown][0]
    made = Tokenizer(BPE(numbers, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback))
    blanks: list[Any] = [normalizers.Replace(" ", _BLANK)]
    made.normalizer = normalizers.Sequence([*even, *([normalizers.Prepend(_BLANK)] if model.prefixed else []), *blanks])
    own = [text for (text, _), kind in zip(model.pieces, model.kinds, strict=True) if kind == _OWN]
    if own and model.prefixed:
        raise ValueError(f"it has pieces of its own, such as {own[0][:20]!r}, and a blank before texts")
    made.add_tokens([AddedToken(text, normalized=True) for text in own])
    return made


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: numbers as int, all else as bytes."""
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
    """Return a varint, and the offset of its end."""
    value = 0
    for i, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * i)
        if not byte & 0x80:
            return value, at + i + 1
    raise ValueError("it is damaged")
