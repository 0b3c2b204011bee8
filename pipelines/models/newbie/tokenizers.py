"""The tokenizers of NewBie's text encoders: from a folder, or from within ComfyUI's files."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ....memory.files import one_line
from ....memory.weights.stored import read_header, read_tensors

_FILES = ("tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model")
_BLOB = "spiece_model"


def folder_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer from a local folder, padding on the right. FileNotFoundError if there is none."""
    if not any((folder / name).is_file() for name in _FILES):
        raise FileNotFoundError(f"{folder / _FILES[0]} is missing. Download all of the folder again.")
    from transformers import AutoTokenizer

    with one_line(folder, "read as a tokenizer"):
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, padding_side="right"
        )


@dataclass(frozen=True)
class PieceTokenizer:
    """A SentencePiece model, called as transformers' tokenizers are. Texts are padded on the right with `pad`.

    `before` and `after` are the tokens around a text, `special` those of marks that SentencePiece would take apart.
    """

    pieces: Any
    pad: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    special: Mapping[str, int] = field(default_factory=dict)

    def __call__(
        self,
        texts: Sequence[str],
        *,
        max_length: int,
        padding: bool = True,
        truncation: bool = True,
        pad_to_multiple_of: int = 1,
        return_tensors: str = "pt",
    ) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, int64 [B, tokens]. Always padded, cut and in tensors."""
        rows = [self._encode(text, max_length) for text in texts]
        longest = max(len(row) for row in rows)
        width = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
        ids = torch.tensor([row + [self.pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}

    def uncut(self, texts: Sequence[str]) -> list[list[int]]:
        """All tokens of each text."""
        return [self._encode(text, sys.maxsize) for text in texts]

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
        """Return the text of some tokens."""
        marks = {self.pad, *self.before, *self.after, *self.special.values()} if skip_special_tokens else set()
        return self.pieces.decode([token for token in ids.tolist() if token not in marks])

    def _encode(self, text: str, max_length: int) -> list[int]:
        marks = "|".join(map(re.escape, self.special))
        ids: list[int] = []
        for part in re.split(f"({marks})", text) if marks else [text]:
            ids += [self.special[part]] if part in self.special else self.pieces.encode(part)
        return [*self.before, *ids[: max_length - len(self.before) - len(self.after)], *self.after]


def embedded_tokenizer(path: Path) -> PieceTokenizer:
    """Return the tokenizer in ComfyUI's file of Gemma 3 or Jina CLIP: a SentencePiece model, as bytes in a tensor.

    ComfyUI feeds the numbers of the pieces to the models as they are. So those in Jina's file are taken to be the ones
    that the model has learnt (`<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3), and a file with XLM-RoBERTa's original ones, in
    which `<s>` is 1 and every word one lower, is refused. Raises ValueError, or ImportError without sentencepiece.
    """
    if _BLOB not in read_header(path):
        raise ValueError(f"{path} holds no tokenizer ({_BLOB}). Use ComfyUI's file of this text encoder, which does.")
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ImportError(
            f"the tokenizer in {path} needs the sentencepiece package: pip install sentencepiece."
        ) from error
    try:
        pieces = SentencePieceProcessor(model_proto=read_tensors([path], [_BLOB])[_BLOB].numpy().tobytes())
    except RuntimeError as error:
        raise ValueError(f"the tokenizer in {path} is damaged. Download the file again.") from error
    ends = pieces.bos_id(), pieces.eos_id()
    if ends == (0, 2):  # Jina's
        return PieceTokenizer(pieces, pad=1, before=(0,), after=(2,))
    if ends == (2, 1):  # Gemma's, which puts no end after a text
        marks = {"<image_soft_token>": 262144, "<end_of_turn>": 106}
        return PieceTokenizer(pieces, pad=0, before=(2,), special=marks)
    raise ValueError(
        f"the tokenizer in {path} is neither Gemma 3's nor Jina CLIP v2's. Use ComfyUI's file of that text encoder."
    )
