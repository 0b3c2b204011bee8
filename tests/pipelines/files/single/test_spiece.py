"""Tokenizers in the files of encoders, against SentencePiece itself."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import gguf
import pytest
import sentencepiece
import torch
from ballast.pipelines.files.single import published
from ballast.pipelines.files.single.spiece import CarriedTokenizer, carries_tokenizer, read_spiece, tokenizer_of
from safetensors.torch import save_file
from single_files import state_of
from single_files.published_facts import facts_of, files_of

WORDS = "a red boat lies on the wet sand of wide bays at low tide gulls houses climbing green hills under heavy clouds"
TEXTS = [
    "a red boat",
    WORDS,
    WORDS.replace(" ", ""),
    "redboatsandtide hillshousesclimb gullsundera wideawet",
    "",
    " ",
    "  two  spaces\tand\nlines  ",
    "Houses, hills; (clouds)!",
    "na\u00efve caf\u00e9, \ufb01ne \u2460 \uff21\uff22",
    "\u4e00\u53ea\u7ea2\u8239 \u548c \U0001f6a4\U0001f6a4 boats",
    "\u00a0boat\u3000red\u200b",
    "x" * 300,
]


def trained(vocab_size: int = 120, **more: object) -> bytes:
    """A small model with the special tokens of T5."""
    made = io.BytesIO()
    sentences = [" ".join(words) for words in itertools.permutations(WORDS.split()[:7], 5)] + [WORDS] * 40
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=made, vocab_size=vocab_size, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2, hard_vocab_limit=False, **more,
    )  # fmt: skip
    return made.getvalue()


KINDS: list[dict[str, object]] = [
    {},
    {"normalization_rule_name": "nfkc_cf"},
    {"byte_fallback": True, "vocab_size": 400},
]


@pytest.mark.parametrize("more", KINDS, ids=str)
def test_numbers_are_those_of_sentencepiece(more: dict[str, Any]) -> None:
    blob = trained(**more)
    expected = sentencepiece.SentencePieceProcessor(model_proto=blob)
    found, count = tokenizer_of(read_spiece(blob)), expected.get_piece_size()
    assert read_spiece(blob).pieces == [(expected.id_to_piece(i), expected.get_score(i)) for i in range(count)]
    assert found.get_vocab_size() == count
    for text in TEXTS:
        assert found.encode(text).ids == [*expected.encode(text), 1], text


def carried(path: Path, blob: bytes, **settings: object) -> CarriedTokenizer:
    save_file({"spiece_model": torch.frombuffer(bytearray(blob), dtype=torch.uint8)}, path)
    assert carries_tokenizer(path)
    return CarriedTokenizer("tokenizer", path.parent, object, None, dict(settings), source=path)


def test_a_tokenizer_in_a_file_pads_and_cuts(tmp_path: Path) -> None:
    component = carried(tmp_path / "umt5.safetensors", trained(), model_max_length=6)
    found = component.create()(["a red boat", "the wet sand of wide bays"], padding="max_length", truncation=True)
    assert [len(ids) for ids in found.input_ids] == [6, 6]
    assert found.input_ids[1][-1] == 1 and found.attention_mask[0][-1] == 0 == found.input_ids[0][-1]
    assert component.identity() != carried(tmp_path / "umt5.safetensors", trained(), model_max_length=7).identity()


def write_gguf(path: Path, blob: bytes, **change: object) -> None:
    """The tokenizer as llama.cpp's converter writes that of T5, with more pieces than there are, which it pads."""
    model = sentencepiece.SentencePieceProcessor(model_proto=blob)
    count = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)
    ]
    words = {
        "tokens": [*(model.id_to_piece(i) for i in range(count)), "[PAD0]"],
        "scores": [*(model.get_score(i) for i in range(count)), -10000.0],
        "types": [*kinds, 5],
    } | change
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(words["tokens"])
    writer.add_token_scores(words["scores"])
    writer.add_token_types(words["types"])
    writer.add_precompiled_charsmap(read_spiece(blob).charsmap)
    writer.add_tensor("enc.output_norm.weight", torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("more", [{}, {"byte_fallback": True, "vocab_size": 400}], ids=str)
def test_numbers_are_the_same_from_gguf(more: dict[str, Any], tmp_path: Path) -> None:
    blob = trained(**more)
    write_gguf(path := tmp_path / "umt5.gguf", blob)
    assert carries_tokenizer(path)
    made = CarriedTokenizer("tokenizer", tmp_path, object, None, {}, source=path).create()
    expected = sentencepiece.SentencePieceProcessor(model_proto=blob)
    for text in TEXTS:
        assert made(text).input_ids == [*expected.encode(text), 1], text


@pytest.mark.parametrize("change", [{"types": [1, 1]}, {"scores": [0.0]}, {"tokens": ["a"]}], ids=str)
def test_facts_that_do_not_belong_together(change: dict[str, Any], tmp_path: Path) -> None:
    write_gguf(path := tmp_path / "umt5.gguf", trained(), **change)
    with pytest.raises(ValueError, match="do not belong together"):
        CarriedTokenizer("tokenizer", tmp_path, object, None, {}, source=path).create()


@pytest.mark.parametrize(
    "change", [lambda b: b[: len(b) // 2], lambda b: b"\xff" * 40, lambda b: b"", lambda b: b"\x0a\x05ab"]
)
def test_damaged_bytes_are_told_in_one_line(change, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError) as caught:
        carried(tmp_path / "umt5.safetensors", change(trained()) or b"\0").create()
    assert "\n" not in str(caught.value) and "umt5.safetensors" in str(caught.value)


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no unigram model"):
        carried(tmp_path / "gemma.safetensors", trained(model_type="bpe")).create()


def test_wan_opens_from_files_alone(
    tiny_folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokenizer that lies beside the weights of its encoder, and none given."""
    folder = tiny_folders("wan")
    facts_of("wan", folder, tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of("wan", folder, tmp_path)
    given.pop("tokenizers")
    with pytest.raises(ValueError, match="needs the tokenizer of UMT5"):
        ballast.open_pipeline(device="cpu", **given)
    blob = torch.frombuffer(bytearray(trained()), dtype=torch.uint8)
    save_file(state_of(folder, "text_encoder") | {"spiece_model": blob}, given["text_encoders"][0])
    pipe = ballast.open_pipeline(device="cpu", cache_dir=tmp_path, **given)
    one, other = (pipe.encode(text, max_sequence_length=16).tensors["prompt_embeds"] for text in ("a red boat", "sand"))
    assert one.shape[1] == 16 and not torch.equal(one, other)  # type: ignore[union-attr, arg-type]
    tokens = pipe.components["tokenizer"].create()("a red boat").input_ids  # type: ignore[attr-defined]
    assert tokens == [*sentencepiece.SentencePieceProcessor(model_proto=trained()).encode("a red boat"), 1]
