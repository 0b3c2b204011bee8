"""Tiny local models and tokenizers in place of those that diffusers' tests take from the Hub by name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from . import words


class NoReplacementError(LookupError):
    """Nothing here stands for what a test asks of the Hub."""


def _t5_config(**more: Any) -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=1, eos_token_id=3,
        decoder_start_token_id=1, **more,
    )  # fmt: skip


def _bert() -> Any:
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=1124, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4
        )
    )


def _umt5() -> Any:
    return transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=1, eos_token_id=3
        )
    )


_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_DECODER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def _qwen2_vl() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config={**_DECODER, "vocab_size": 152064, "rope_parameters": _ROPE},
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2},
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen3_vl() -> Any:
    config = transformers.Qwen3VLConfig(
        text_config={**_DECODER, "vocab_size": 152064, "head_dim": 8, "rope_parameters": _ROPE},
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
            "deepstack_visual_indexes": [1], "num_position_embeddings": 16,
        },
    )  # fmt: skip
    made = transformers.Qwen3VLForConditionalGeneration(config)
    made.resize_token_embeddings = lambda *args: None  # the ids of its special tokens are high
    return made


def _gemma3() -> Any:
    text = {**_DECODER, "hidden_size": 32, "vocab_size": 1200, "head_dim": 8, "sliding_window": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=1100, boi_token_index=1101,
        eoi_token_index=1102,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER, vocab_size=1200))


def _siglip() -> Any:
    return transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=30,
            patch_size=2,
        )
    )


def _chatglm() -> Any:
    from diffusers.pipelines.kolors import ChatGLMModel
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig

    config = ChatGLMConfig(
        num_layers=2, padded_vocab_size=1200, hidden_size=8, ffn_hidden_size=16, kv_channels=4, num_attention_heads=2,
        multi_query_attention=True, multi_query_group_num=1, add_qkv_bias=True, torch_dtype=torch.float32,
    )  # fmt: skip
    config.original_rope = True
    made = ChatGLMModel(config)
    for parameter in made.parameters():  # its own code leaves them as they come
        torch.nn.init.normal_(parameter, std=0.1)
    return made


MODELS: dict[str, Callable[[], Any]] = {
    "BertModel": _bert,
    "ChatGLMModel": _chatglm,
    "Gemma3ForConditionalGeneration": _gemma3,
    "LlamaForCausalLM": _llama,
    "Qwen2VLForConditionalGeneration": _qwen2_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "SiglipVisionModel": _siglip,
    "T5EncoderModel": lambda: transformers.T5EncoderModel(_t5_config()),
    "UMT5EncoderModel": _umt5,
}


def _image_processor(kind: str = "Qwen2VLImageProcessor", **more: Any) -> Any:
    return getattr(transformers, kind)(**more)


def _processor(name: str) -> Any:
    if "Mistral" in name:
        special = {"[IMG]": 900, "[IMG_BREAK]": 901, "[IMG_END]": 902}
        tokenizer = words.tokenizer(512, "<s>", None, special=special)
        return transformers.PixtralProcessor(_image_processor("PixtralImageProcessor"), tokenizer, patch_size=6)
    if "GlmImage" in name:
        return transformers.GlmImageProcessor(
            _image_processor("GlmImageImageProcessor"), words.qwen(), chat_template=words.CHAT
        )
    small = {"min_pixels": 28 * 28, "max_pixels": 4 * 28 * 28}
    kind, video = transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor
    if "Qwen3" in name:
        small["patch_size"] = 16
        kind, video = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor
    return kind(_image_processor(**small), words.qwen(), video(), chat_template=words.CHAT)


def _tokenizer(cls: str, name: str, **options: Any) -> Any:
    length = options.get("model_max_length")
    if cls.startswith("CLIP"):
        return words.clip(length or 77)
    if "Qwen" in cls or "Qwen" in name:
        return words.qwen()
    if cls == "ChatGLMTokenizer":
        from diffusers.pipelines.kolors import ChatGLMTokenizer

        return ChatGLMTokenizer(str(words.sentences(Path(tempfile.mkdtemp()))))
    if "gemma" in name or "glm" in name or "Llama" in cls or "llama" in name.lower():
        return words.tokenizer(512, "<s>", None, side="left" if "glm" in name else "right")
    return words.tokenizer(length or 512)


def _replaced(owner: type, attribute: str, made: Callable[..., Any]) -> Any:
    stock = owner.__dict__[attribute].__func__

    def replacing(cls: type, name: Any, *args: Any, **options: Any) -> Any:
        if os.path.isdir(str(name)):
            return stock(cls, name, *args, **options)
        return made(cls.__name__, str(name), **options)

    return mock.patch.object(owner, attribute, classmethod(replacing))


def _model(cls: str, name: str, **options: Any) -> Any:
    if cls not in MODELS:
        raise NoReplacementError(f"{cls} {name}")
    return MODELS[cls]()


def _images(cls: str, name: str, **options: Any) -> Any:
    return _image_processor(cls, **{k: v for k, v in options.items() if k != "subfolder"})


def _config(cls: str, name: str, **options: Any) -> Any:
    if "t5" not in name.lower():
        raise NoReplacementError(f"{cls} {name}")
    return _t5_config()


@contextmanager
def local_parts() -> Iterator[None]:
    """Make `from_pretrained` of transformers' classes build tiny parts until the block ends, but for folders."""
    from transformers.feature_extraction_utils import FeatureExtractionMixin
    from transformers.image_processing_base import ImageProcessingMixin

    with ExitStack() as exits:
        for owner, made in (
            (transformers.AutoTokenizer, _tokenizer),
            (transformers.PreTrainedTokenizerBase, _tokenizer),
            (transformers.PreTrainedModel, _model),
            (transformers.AutoConfig, _config),
            (transformers.AutoProcessor, lambda cls, name, **options: _processor(name)),
            (transformers.ProcessorMixin, lambda cls, name, **options: _processor(cls)),
            (ImageProcessingMixin, _images),
            (FeatureExtractionMixin, lambda cls, name, **options: getattr(transformers, cls)()),
        ):
            exits.enter_context(_replaced(owner, "from_pretrained", made))
        yield
