"""Tokenizers of the tiny pipelines: one byte-pair vocabulary, made of the prompt templates in diffusers itself."""

from __future__ import annotations

import functools
import io
import json
import re
from pathlib import Path

import diffusers
import sentencepiece
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_SIZE = 700
_LONG = re.compile(r'"([^"\n]{60,})"')
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}


@functools.cache
def templates() -> tuple[str, ...]:
    """The long texts in the code of diffusers' pipelines."""
    files = sorted((Path(diffusers.__file__).parent / "pipelines").rglob("pipeline_*.py"))
    return tuple(sorted({text for file in files for text in _LONG.findall(file.read_text("utf-8"))}))


@functools.cache
def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(templates(), trainer)
    model = json.loads(core.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def tokenizer(
    max_length: int = 512,
    begin: str | None = None,
    end: str | None = "</s>",
    pad: str = "<pad>",
    special: dict[str, int] | None = None,
    side: str = "right",
    named: dict[str, str] | None = None,
) -> transformers.PreTrainedTokenizerFast:
    """A byte-pair tokenizer whose special tokens are 0 to 9, or have the ids that `special` gives them."""
    vocabulary, merges = _vocabulary()
    first = {"<s>": 0, "<pad>": 1, "<unk>": 2, "</s>": 3, "<mask>": 4}
    ids = {token: at + 10 for token, at in vocabulary.items()} | first | (special or {})
    core = Tokenizer(models.BPE(ids, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    around = [token for token in (begin, end) if token]
    if around:
        single = " ".join(filter(None, (begin, "$A", end)))
        core.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(token, ids[token]) for token in around]
        )
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=begin or "<s>",
        eos_token=end or "</s>",
        pad_token=pad,
        unk_token="<unk>",
        mask_token="<mask>",
        extra_special_tokens=named or list(special or {}),
        model_max_length=max_length,
        padding_side=side,
    )
    wrapped.chat_template = CHAT
    return wrapped


def clip(max_length: int = 77) -> transformers.PreTrainedTokenizerFast:
    """Begins and ends as that of CLIP, whose end has the highest id: it pools there."""
    special = {"<|startoftext|>": 800, "<|endoftext|>": 801}
    return tokenizer(max_length, "<|startoftext|>", "<|endoftext|>", "<|endoftext|>", special)


def qwen(max_length: int = 131072) -> transformers.PreTrainedTokenizerFast:
    """With the special tokens of Qwen-VL, at their places."""
    named = {"image_token": "<|image_pad|>", "grid_bos_token": "<|vision_start|>", "grid_eos_token": "<|vision_end|>"}
    named |= {f"special_{number}": token for number, token in enumerate(QWEN)}
    made = tokenizer(max_length, None, None, "<|endoftext|>", QWEN, named=named)
    made.eos_token = "<|im_end|>"
    return made


def sentences(folder: Path) -> Path:
    """A model of sentencepiece, for a tokenizer that wants a file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.replace("\n", " ") for text in templates()),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path
