"""The transformers that are measured: diffusers' own classes with published configs, and seeded random weights."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..memory.codecs.converters import CONVERTERS
from ..memory.weights.conversion import planned_codecs
from ..memory.weights.encoding import EncodedWeight, encoding_of, mark_encoded, part_spans, split

POOL = 2**22  # random numbers that all weights are cut from: drawing billions of them takes minutes
_IMAGE_TOKENS = 4096  # of one image at most (1024 x 1024 pixels); more tokens are more images


@dataclass(frozen=True)
class Size:
    """A model class of diffusers, its config and what its inputs look like."""

    class_name: str
    config: dict[str, Any]
    dtype: torch.dtype
    text_tokens: int
    tokens: int  # of the images, where nothing else is asked for


_LUMINA, _HIDREAM = "Lumina2Transformer2DModel", "HiDreamImageTransformer2DModel"
_HIDREAM_PATCHES = {"patch_size": 2, "in_channels": 16, "out_channels": 16}

_TINY_PIXART = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 20, "num_attention_heads": 3,
    "attention_head_dim": 16, "cross_attention_dim": 48, "caption_channels": 16, "interpolation_scale": 1,
    "use_additional_conditions": False,
}  # fmt: skip
_TINY_LUMINA = {
    "in_channels": 16, "hidden_size": 96, "num_layers": 4, "num_refiner_layers": 1, "num_attention_heads": 2,
    "num_kv_heads": 1, "axes_dim_rope": (16, 16, 16), "axes_lens": (64, 64, 64), "cap_feat_dim": 48,
}  # fmt: skip
_NEWBIE = {
    "in_channels": 16, "hidden_size": 2304, "num_layers": 36, "axes_lens": (1024, 512, 512), "cap_feat_dim": 2560,
}  # fmt: skip
_TINY_HIDREAM = {
    **_HIDREAM_PATCHES, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
    "caption_channels": (32, 32), "text_emb_dim": 64, "num_routed_experts": 4, "num_activated_experts": 2,
    "axes_dims_rope": (16, 8, 8), "llama_layers": (0, 1, 1, 1), "max_resolution": (32, 32),
}  # fmt: skip
_FULL_HIDREAM = {
    **_HIDREAM_PATCHES, "caption_channels": (4096, 4096), "axes_dims_rope": (64, 32, 32),
    "llama_layers": (*range(32), *(31,) * 16),
}  # fmt: skip
SIZES = {
    "tiny": Size("PixArtTransformer2DModel", _TINY_PIXART, torch.float32, 16, 64),
    "tiny-newbie": Size(_LUMINA, _TINY_LUMINA, torch.bfloat16, 16, 64),
    "tiny-hidream": Size(_HIDREAM, _TINY_HIDREAM, torch.bfloat16, 16, 64),
    "newbie": Size(_LUMINA, _NEWBIE, torch.bfloat16, 128, _IMAGE_TOKENS),
    "hidream": Size(_HIDREAM, _FULL_HIDREAM, torch.bfloat16, 128, _IMAGE_TOKENS),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """Return the model on the CPU, in eval mode; the same weights for the same seed.

    Its parameters are made once, in their final dtype. Buffers and tables are those of the class.
    """
    size, module = SIZES[name], empty(name)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(POOL, dtype=torch.float32).normal_(generator=generator).to(size.dtype)
    for path, owner in module.named_modules():
        for key, unset in list(owner._parameters.items()):
            if unset is not None:
                owner._parameters[key] = nn.Parameter(drawn(unset.shape, key, pool, generator), requires_grad=False)
        assert not any(tensor.is_meta for tensor in owner._buffers.values() if tensor is not None), path
    return module


def empty(name: str) -> nn.Module:
    """Return the model in eval mode, with parameters on `meta` in their final dtype."""
    import diffusers
    from accelerate import init_empty_weights

    size = SIZES[name]
    with init_empty_weights(include_buffers=False):
        module = getattr(diffusers, size.class_name)(**size.config)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(size.dtype)
    return module.eval().requires_grad_(False)


def drawn(shape: torch.Size, name: str, pool: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a weight of random numbers about as large as a model's: the pool's, over and over, from a random place."""
    scale = math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.02
    weight = torch.empty(shape, dtype=pool.dtype)
    flat = weight.view(-1)
    at, start = 0, int(torch.randint(POOL, (), generator=generator))
    while at < flat.numel():
        group = pool[start : start + flat.numel() - at]
        torch.mul(group, scale, out=flat[at : at + group.numel()])
        at, start = at + group.numel(), 0
    return weight.add_(1) if len(shape) == 1 and name.endswith("weight") else weight  # a norm's


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once."""
    return sum({id(t): t.nbytes for t in (*module.parameters(), *module.buffers())}.values())


def inputs(name: str, tokens: int, device: torch.device, seed: int = 1) -> dict[str, Any]:
    """Keyword arguments of a forward call on about so many image tokens, on the device."""
    size = SIZES[name]
    images = max(1, -(-tokens // _IMAGE_TOKENS))
    side = max(1, round(math.sqrt(tokens / images)))
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(size.dtype).to(device)

    config = size.config
    latents = noise(images, config["in_channels"], 2 * side, 2 * side)  # patches of 2 x 2
    given: dict[str, Any] = {"hidden_states": latents, "return_dict": False}
    if size.class_name == "PixArtTransformer2DModel":
        return given | {
            "timestep": torch.full((images,), 500.0).to(device),
            "encoder_hidden_states": noise(images, size.text_tokens, config["caption_channels"]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
    if size.class_name == _LUMINA:
        return given | {
            "timestep": torch.full((images,), 0.5, dtype=size.dtype).to(device),
            "encoder_hidden_states": noise(images, size.text_tokens, config["cap_feat_dim"]),
            "encoder_attention_mask": torch.ones(images, size.text_tokens, dtype=torch.bool).to(device),
        }
    width, layers = config["caption_channels"][0], max(config["llama_layers"]) + 1
    return given | {
        "timesteps": torch.full((images,), 500.0).to(device),
        "encoder_hidden_states_t5": noise(images, size.text_tokens, width),
        "encoder_hidden_states_llama3": noise(layers, images, size.text_tokens, width),
        "pooled_embeds": noise(images, config.get("text_emb_dim", 2048)),
    }


def encode(module: nn.Module, weights: str) -> None:
    """Encode the weights of a module on the CPU that a converter, such as "exact12", makes smaller, for good.

    All cores share the weights, each of which is encoded by one.
    """
    converter = CONVERTERS[weights]

    def one(name: str) -> None:
        path, _, key = name.rpartition(".")
        weight = module.get_parameter(name).detach()
        codec, parts = converter.encode(weight)
        shown = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        module.get_submodule(path)._parameters[key] = shown
        mark_encoded(module, {name: EncodedWeight(codec, ())})
        encoding = encoding_of(shown)
        assert encoding is not None
        encoding.flat = torch.zeros(part_spans(codec)[1], dtype=torch.uint8)
        for view, part in zip(split(codec, encoding.flat), parts, strict=True):
            view.copy_(part.reshape(-1))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, planned_codecs(module, converter)))
