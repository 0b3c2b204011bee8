"""What the tiny pipelines are made of: the family description, text encoders, an image VAE, a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import transformers
from ballast.bench.downloads.full_size import tokenizer as tokenizer
from diffusers import DiffusionPipeline

TEXT_TOKENS = 48
SIZE = (48, 32)


@dataclass(frozen=True)
class Family:
    """How to build one pipeline and how to call it."""

    name: str
    class_name: str
    build: Callable[[], DiffusionPipeline]
    size: tuple[int, int] = SIZE
    """Width and height that suit the family; not square, to catch swapped axes."""
    frames: int | None = None
    guidance: float = 4.0
    """A value that turns classifier-free guidance on, or that a distilled model is told."""
    guidance_name: str = "guidance_scale"
    """The argument of `__call__` that takes it; "guider" where a component of that name holds it instead."""
    encode_kwargs: dict[str, Any] = field(default_factory=lambda: {"max_sequence_length": TEXT_TOKENS})
    """Arguments for `encode_prompt`, and for the stock `__call__`, which hands them on."""
    call_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for `__call__` only, staged or stock."""
    prepare: Callable[..., None] | None = None
    """What to set on a loaded pipeline before it runs, staged or stock: `prepare(pipe)` for the family's own
    size, `prepare(pipe, width, height)` for another."""
    negative: bool = True
    """Whether the stock `__call__` takes a negative prompt."""
    distilled: bool = False
    """Whether the model is told its guidance, and classifier-free guidance is its `true_cfg_scale`."""


def clip(projection: bool = False, positions: int = 77) -> transformers.PreTrainedModel:
    """A CLIP text tower that pools at the end token, as the real ones do."""
    config = transformers.CLIPTextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=40,
        projection_dim=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=positions,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=3,
    )
    kind = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return kind(config)


def t5(width: int = 32, multilingual: bool = False) -> transformers.PreTrainedModel:
    """The encoder half of a gated T5."""
    sizes = {"vocab_size": 128, "d_model": width, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    ends = {"pad_token_id": 1, "eos_token_id": 3, "feed_forward_proj": "gated-gelu"}
    if multilingual:
        return transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes, **ends))
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, **ends))


def decoder_sizes(width: int = 16, layers: int = 2, **more: Any) -> dict[str, Any]:
    """Config values that the Llama, Gemma and Qwen text models have in common."""
    return {
        "vocab_size": 128,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 3,
        **more,
    }


def autoencoder(**more: Any) -> diffusers.AutoencoderKL:
    """A four-level image VAE with four latent channels."""
    values: dict[str, Any] = {
        "sample_size": 32,
        "block_out_channels": (4, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.0609,
        "scaling_factor": 1.5035,
    }
    return diffusers.AutoencoderKL(**{**values, **more})


def flow(shift: float = 3.0, **more: Any) -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift, **more)


def two_streams(**more: Any) -> dict[str, Any]:
    """Config values that the transformers of the Flux kind have in common."""
    return {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        **more,
    }


def gemma2() -> transformers.PreTrainedModel:
    return transformers.Gemma2Model(transformers.Gemma2Config(**decoder_sizes(head_dim=8, sliding_window=16)))


MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
