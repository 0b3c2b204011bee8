"""Build a pipeline class tiny, with a test of diffusers, and what to call it with."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ballast.pipelines.stock.signatures import Scales, needed_inputs, scales_of
from diffusers import AutoencoderKL
from PIL.Image import Image, fromarray
from transformers import Gemma2Config, Gemma2Model, PreTrainedModel

from .borrowing import further_inputs
from .catalogue import public
from .quirks import small
from .replacing import local_parts

_TOKENS = 128  # of a text, so that the prompt is not cut off behind its template
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
_TEXTS = ("prompt", "negative_prompt")
_BESIDE = ("CogView4ControlPipeline", "LucyEditPipeline")  # give their transformer pictures beside the latents
_UNUSED = {"generator", "output_type", "return_dict", "num_images_per_prompt", "num_videos_per_prompt", "callback",
           "callback_on_step_end", "callback_on_step_end_tensor_inputs", "latents"}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A tiny pipeline in a folder, and the arguments that its test calls it with, less texts and generator."""

    folder: Path
    cls: Any
    inputs: dict[str, Any]
    scales: Scales
    own: dict[str, Any] = field(default_factory=dict)  # its pictures in the form that its test gives


def build(tester: Any, folder: Path, borrower: Any = None) -> Built:
    """Build the pipeline of a test class, or another of its parts, and save it. Raises what the test's code raises."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), local_parts():
        torch.manual_seed(0)
        test = tester()
        if hasattr(test, "setUp") and "setUp" in tester.__dict__:
            test.setUp()
        components = test.get_dummy_components()
        _fit_vocabularies(components)
        cls = borrower or public(tester.pipeline_class)
        _fit_parts(cls, components)
        if borrower:
            takes = inspect.signature(cls.__init__).parameters
            components = {name: part for name, part in components.items() if name in takes}
        if "LTX2" in cls.__name__:
            components["tokenizer"].padding_side = "left"  # as that of the real one
        if "Cosmos" in cls.__name__:
            components["safety_checker"] = None  # a class of the tests, which no folder can name
        with small(cls):
            pipe = cls(**components)
        if "Cosmos" in cls.__name__:
            pipe.register_modules(safety_checker=None)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                _fill_zeros(part)
                part.float().eval().requires_grad_(False)
        given = ("cpu",) if "device" in inspect.signature(test.get_dummy_inputs).parameters else ()
        inputs = test.get_dummy_inputs(*given)
    with small(cls):
        pipe.save_pretrained(folder, safe_serialization=True)
    taken = inspect.signature(cls.__call__).parameters
    inputs = {k: v for k, v in inputs.items() if k in taken and v is not None and k not in (*_UNUSED, *_TEXTS)}
    if count := inputs.get("num_frames"):
        step = next((getattr(pipe, name) for name in _TEMPORAL if getattr(pipe, name, None)), 1)
        alone = "Allegro" not in cls.__name__  # the first frame
        inputs["num_frames"] = max(1, (count - alone) // step) * step + alone  # which some tests do not keep to
    if "image_crf" in taken:
        inputs["image_crf"] = 0  # else it needs a video codec
    if borrower:
        inputs |= further_inputs(cls, inputs)
    fixed = "max_text_seq_length" in getattr(getattr(pipe, "transformer", None), "config", {})
    if inputs.get("max_sequence_length", _TOKENS) < _TOKENS and not fixed:
        inputs["max_sequence_length"] = _TOKENS
    # What may be left out is, save for classes that are nothing without.
    needed = needed_inputs(cls)
    kept = {k for k, v in inputs.items() if k in needed or not _is_picture(v)}
    own = {k: v for k, v in inputs.items() if _is_picture(v)}
    inputs = {k: _as_pil(v, k) if k in needed else v for k, v in inputs.items() if k in kept}
    if {"height", "width"} <= taken.keys() and "height" not in inputs and _default(pipe) > 128:
        inputs |= dict.fromkeys(("height", "width"), 128 if "HiDream" in cls.__name__ else 64)
    transformer = components.get("transformer")
    embeds = transformer is not None and bool(transformer.config.get("guidance_embeds", True))
    return Built(folder, cls, inputs, scales_of(cls, "guider" in components, embeds), own)


def _as_pil(value: Any, name: str) -> Any:
    """A picture of a test as PIL's, in the form that all pipelines take; anything else as it is."""
    if isinstance(value, Image):
        return value.convert("L" if "mask" in name else "RGB")
    if isinstance(value, list | tuple):
        return [_as_pil(one, name) for one in value]
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value).movedim(-1, -3)
    if not isinstance(value, torch.Tensor):
        return value
    rows = value.float().reshape(-1, *value.shape[-2:])[:3].clamp(0, 1)
    rows = rows[:1].round() if "mask" in name else rows.expand(3, -1, -1)
    pixels = (rows.movedim(0, -1) * 255).round().byte().numpy()
    return fromarray(pixels[..., 0] if "mask" in name else pixels)


def _is_picture(value: Any) -> bool:
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Image | torch.Tensor | np.ndarray) or type(first).__name__.endswith("Condition")


def _default(pipe: Any) -> int:
    """The size in pixels that a pipeline draws by default."""
    return getattr(pipe, "default_sample_size", 128) * getattr(pipe, "vae_scale_factor", 8)


def _fit_parts(cls: Any, components: dict[str, Any]) -> None:
    """Make parts that a test has otherwise than the real models: their class, or how many channels they take."""
    encoder, transformer = components.get("text_encoder"), components.get("transformer")
    if type(encoder).__name__ == "Gemma2ForCausalLM":  # whose results have the width of the vocabulary
        config = {**encoder.config.to_dict(), "hidden_size": transformer.config.caption_channels}
        components["text_encoder"] = Gemma2Model(Gemma2Config(**config))
    if cls.__name__.startswith("HunyuanDiT"):  # whose code counts tokens of 16 pixels
        components["vae"] = AutoencoderKL(
            block_out_channels=(8,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
        )
    if cls.__name__ in _BESIDE:
        channels = transformer.config.in_channels
        config = {**transformer.config, "in_channels": 2 * channels, "out_channels": channels}
        components["transformer"] = type(transformer).from_config(config)


def _fit_vocabularies(components: dict[str, Any]) -> None:
    """Give each text encoder an embedding for every token of its tokenizer."""
    for name, tokenizer in components.items():
        encoder = components.get(name.replace("tokenizer", "text_encoder").replace("processor", "text_encoder"))
        words = getattr(tokenizer, "tokenizer", tokenizer)
        if not (hasattr(words, "get_vocab") and isinstance(encoder, PreTrainedModel)):
            continue
        count = max(words.get_vocab().values()) + 1
        if encoder.get_input_embeddings().num_embeddings < count:
            encoder.resize_token_embeddings(count, mean_resizing=False)
            encoder.config.vocab_size = count  # which some keep in a part of their config


def _fill_zeros(module: torch.nn.Module) -> None:
    by_chance = type(module).__name__ == "ChatGLMModel"  # which leaves its weights as memory was
    for parameter in module.parameters():
        if parameter.is_floating_point() and (by_chance or not parameter.any()):
            parameter.normal_(std=0.05)
