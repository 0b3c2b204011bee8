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
from ballast.pipelines.files.single.spiece import (
    CarriedTokenizer,
    carries_tokenizer,
    model_in,
    read_spiece,
    tokenizer_of,
)
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
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=made, vocab_size=vocab_size, minloglevel=2,
        hard_vocab_limit=False, **ids | more,
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


def write_gguf(path: Path, blob: bytes, kind: str = "t5", prefixed: bool = True, **change: object) -> None:
    """The tokenizer as llama.cpp's converter writes that of T5, with more pieces than there are, which it pads."""
    model = sentencepiece.SentencePieceProcessor(model_proto=blob)
    count = model.get_piece_size()
    kinds = read_spiece(blob).kinds
    words = {
        "tokens": [*(model.id_to_piece(i) for i in range(count)), "[PAD0]"],
        "scores": [*(model.get_score(i) for i in range(count)), -10000.0],
        "types": [*kinds, 5],
    } | change
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_tokenizer_model(kind)
    writer.add_add_space_prefix(prefixed)
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
        carried(tmp_path / "t5.safetensors", trained(model_type="char")).create()
    own = trained(400, model_type="bpe", byte_fallback=True, user_defined_symbols=["<n>"])
    with pytest.raises(ValueError, match="pieces of its own, such as '<n>'"):
        carried(tmp_path / "t5.safetensors", own).create()


GEMMA: dict[str, Any] = {
    "model_type": "bpe", "byte_fallback": True, "vocab_size": 440, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>",
    "eos_piece": "<eos>", "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
    "add_dummy_prefix": False, "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n\n", "\u2581\u2581"],
}  # fmt: skip
PILE_T5: dict[str, Any] = {
    "model_type": "bpe", "byte_fallback": True, "vocab_size": 400, "bos_id": 3, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gemma", "pile_t5"])
@pytest.mark.parametrize("how", ["safetensors", "gguf", "model"])
def test_pairs_are_merged_as_by_sentencepiece(kind: str, how: str, tmp_path: Path) -> None:
    """Gemma's, which begins with <bos> and keeps runs of blanks; and Pile-T5's, which ends with </s>."""
    blob = trained(**(GEMMA if kind == "gemma" else PILE_T5))
    expected = sentencepiece.SentencePieceProcessor(model_proto=blob)
    path = tmp_path / f"tokenizer.{how}"
    if how == "gguf":
        write_gguf(path, blob, kind="llama", prefixed=kind == "pile_t5")
        assert carries_tokenizer(path)
    elif how == "model":
        path.write_bytes(blob)
        assert model_in(tmp_path) == path
    else:
        carried(path, blob)
    made = CarriedTokenizer("tokenizer", tmp_path, object, None, {"model_max_length": 999}, source=path).create()
    for text in [*TEXTS, "<start_of_turn>user\na  boat<end_of_turn>\n\nred   boats", "\n\n\n  "]:
        ids = expected.encode(text)
        assert made(text).input_ids == ([2, *ids] if kind == "gemma" else [*ids, 1]), text
    assert made.pad_token_id == 0 and made.eos_token_id == 1 and made.bos_token_id == expected.bos_id()


def test_a_folder_that_transformers_reads_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(b"")
    assert model_in(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    assert model_in(tmp_path) is None


@pytest.mark.parametrize(("family", "who", "more"), [("wan", "UMT5", {}), ("sana", "Gemma 2", GEMMA)])
def test_files_alone_have_their_tokenizer(
    family: str,
    who: str,
    more: dict[str, Any],
    tiny_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That which lies beside the weights of the encoder, and none is given."""
    folder = tiny_folders(family)
    facts_of(family, folder, tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of(family, folder, tmp_path)
    given.pop("tokenizers")
    with pytest.raises(ValueError, match=f"needs the tokenizer of {who}"):
        ballast.open_pipeline(device="cpu", **given)
    small = trained(**more | ({"vocab_size": 120, "byte_fallback": False} if more else {}))
    blob = torch.frombuffer(bytearray(small), dtype=torch.uint8)
    save_file(state_of(folder, "text_encoder") | {"spiece_model": blob}, given["text_encoders"][0])
    pipe = ballast.open_pipeline(device="cpu", cache_dir=tmp_path, **given)
    one, other = (pipe.encode(text, max_sequence_length=16).tensors["prompt_embeds"] for text in ("a red boat", "sand"))
    assert one.shape[1] == 16 and not torch.equal(one, other)  # type: ignore[union-attr, arg-type]
    tokens = pipe.model.components["tokenizer"].create()("a red boat").input_ids  # type: ignore[attr-defined]
    ids = sentencepiece.SentencePieceProcessor(model_proto=small).encode("a red boat")
    assert tokens == ([2, *ids] if more else [*ids, 1])
