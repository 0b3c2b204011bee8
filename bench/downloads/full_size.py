"""Model folders of the published sizes without weights, for planning memory at full size on a CPU.

    folder = full_size.build("flux", tmp_path / "flux")

A folder has the published configs and sparse files of weights: real headers, and zeros that take no disk. The
tokenizers have one token for each character.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import split_torch_state_dict_into_shards
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedModel

from ...pipelines.models.newbie.gemma import GEMMA_3_4B
from ...pipelines.models.newbie.sizes import PUBLISHED
from ...pipelines.models.newbie.transformer import NewbieTransformer2DModel
from ...pipelines.models.pyramid_flow.flux import PyramidFluxTransformer3DModel
from ...pipelines.models.pyramid_flow.vae import CausalVideoVAE

# What the published configs say and the classes do not have as defaults.
CLIP_L = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LONG_CLIP_L = {**CLIP_L, "max_position_embeddings": 248}
LONG_CLIP_BIG_G = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "max_position_embeddings": 218, "hidden_act": "gelu", "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
T5_XXL = {
    "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
UMT5_XXL = {**T5_XXL, "vocab_size": 256384}
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
QWEN_VL_7B = {
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6, "bos_token_id": 151643, "eos_token_id": 151645,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "tokens_per_second": 2,
    },
}  # fmt: skip
QWEN3_4B = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
FLUX_VAE = {
    "sample_size": 1024, "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 16,
    "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
HIDREAM = {
    "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 16, "num_single_layers": 32,
    "attention_head_dim": 128, "num_attention_heads": 20, "caption_channels": [4096, 4096], "text_emb_dim": 2048,
    "axes_dims_rope": [64, 32, 32], "llama_layers": [*range(32), *[31] * 16],
}  # fmt: skip
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "hidream": {
        "text_encoder": LONG_CLIP_L, "text_encoder_2": LONG_CLIP_BIG_G, "text_encoder_3": T5_XXL,
        "text_encoder_4": LLAMA_8B, "transformer": HIDREAM, "vae": FLUX_VAE,
    },
    "flux": {
        "text_encoder": CLIP_L, "text_encoder_2": T5_XXL, "transformer": {"guidance_embeds": True}, "vae": FLUX_VAE,
    },
    "wan": {"text_encoder": UMT5_XXL, "transformer": {}, "vae": {}},
    "qwenimage": {"text_encoder": QWEN_VL_7B, "transformer": {}, "vae": {}},
}  # fmt: skip
_KLEIN = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
# Those that edit pictures, which few tests need.
EDIT_PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "flux2_klein": {"text_encoder": QWEN3_4B, "transformer": _KLEIN, "vae": {}},
}
# A pipeline, the classes of its parts by their names, and of its tokenizers the most tokens.
CLASSES: dict[str, tuple[type, dict[str, type], dict[str, int]]] = {
    "hidream": (
        diffusers.HiDreamImagePipeline,
        {
            "text_encoder": transformers.CLIPTextModelWithProjection,
            "text_encoder_2": transformers.CLIPTextModelWithProjection, "text_encoder_3": transformers.T5EncoderModel,
            "text_encoder_4": transformers.LlamaForCausalLM,
            "transformer": diffusers.HiDreamImageTransformer2DModel, "vae": diffusers.AutoencoderKL,
        },
        {"tokenizer": 248, "tokenizer_2": 248, "tokenizer_3": 512, "tokenizer_4": 512},
    ),
    "flux": (
        diffusers.FluxPipeline,
        {
            "text_encoder": transformers.CLIPTextModel, "text_encoder_2": transformers.T5EncoderModel,
            "transformer": diffusers.FluxTransformer2DModel, "vae": diffusers.AutoencoderKL,
        },
        {"tokenizer": 77, "tokenizer_2": 512},
    ),
    "wan": (
        diffusers.WanPipeline,
        {
            "text_encoder": transformers.UMT5EncoderModel, "transformer": diffusers.WanTransformer3DModel,
            "vae": diffusers.AutoencoderKLWan,
        },
        {"tokenizer": 512},
    ),
    "qwenimage": (
        diffusers.QwenImagePipeline,
        {
            "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration,
            "transformer": diffusers.QwenImageTransformer2DModel, "vae": diffusers.AutoencoderKLQwenImage,
        },
        {"tokenizer": 512},
    ),
    "flux2_klein": (
        diffusers.Flux2KleinPipeline,
        {
            "text_encoder": transformers.Qwen3ForCausalLM, "transformer": diffusers.Flux2Transformer2DModel,
            "vae": diffusers.AutoencoderKLFlux2,
        },
        {"tokenizer": 512},
    ),
}  # fmt: skip
UNIPC_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
FULL_SIZE = tuple(PARTS)

SCHEDULERS: dict[str, Callable[[], object]] = {
    "hidream": lambda: diffusers.UniPCMultistepScheduler(**UNIPC_FLOW),
    "flux": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    "flux2_klein": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    "wan": lambda: diffusers.UniPCMultistepScheduler(**UNIPC_FLOW),
    "qwenimage": lambda: diffusers.FlowMatchEulerDiscreteScheduler(
        shift=1.0, use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    ),
}
_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}


def build(name: str, folder: Path, variant: str = "768p") -> Path:
    """Write one of FULL_SIZE or EDIT_PARTS in the diffusers layout, "newbie" or "pyramid", and return the folder.

    `variant` is that of Pyramid-Flow: "768p" or "384p".
    """
    if name == "newbie":
        return build_newbie(folder)
    if name == "pyramid":
        return build_pyramid(folder, variant)
    pipeline, classes, texts = CLASSES[name]
    configs = (PARTS | EDIT_PARTS)[name]
    parts = {part: empty(cls, configs[part]) for part, cls in classes.items()}
    tokenizers = {part: tokenizer(length, chat=name == "flux2_klein") for part, length in texts.items()}
    pipe = pipeline(**parts, **tokenizers, scheduler=SCHEDULERS[name]())
    if name == "qwenimage":
        template = pipe.prompt_template_encode.split("{}")[0]
        pipe.tokenizer = tokenizer(squeeze=(template, pipe.prompt_template_encode_start_idx))
    pipe.save_config(folder)
    for part, component in pipe.components.items():
        if isinstance(component, nn.Module):
            dtype = torch.float32 if (name, part) == ("wan", "vae") else torch.bfloat16
            shard = "10GB" if (name, part) == ("flux", "transformer") else "5GB"
            save(component, folder / part, dtype, shard)
        elif component is not None:
            component.save_pretrained(folder / part)
    return folder


def build_newbie(folder: Path) -> Path:
    """NewBie in the folders that the fork of diffusers has, with Gemma's and Jina's published sizes."""
    save(empty(NewbieTransformer2DModel, PUBLISHED), folder / "transformer", torch.bfloat16, "10GB")
    save(empty(transformers.Gemma3TextModel, GEMMA_3_4B), folder / "text_encoder", torch.bfloat16)
    with init_empty_weights(include_buffers=False):
        jina = transformers.JinaEmbeddingsV3Model(transformers.JinaEmbeddingsV3Config(), add_pooling_layer=False)
    save(jina, folder / "text_encoder_2", torch.bfloat16)
    save(empty(diffusers.AutoencoderKL, FLUX_VAE), folder / "vae", torch.float32)
    for name in ("tokenizer", "tokenizer_2"):
        tokenizer().save_pretrained(folder / name)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "NewbiePipeline"}), encoding="utf-8")
    return folder


def build_pyramid(folder: Path, variant: str = "768p") -> Path:
    """Pyramid-Flow's miniFlux in its folders."""
    parts: dict[str, tuple[type, dict[str, Any], str]] = {
        f"diffusion_transformer_{variant}": (PyramidFluxTransformer3DModel, {}, "PyramidFluxTransformer"),
        "causal_video_vae": (CausalVideoVAE, {}, "CausalVideoVAE"),
    }
    for name, (cls, config, published) in parts.items():
        save(empty(cls, config), folder / name, torch.bfloat16, "10GB")
        path = folder / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"_class_name": published}), encoding="utf-8")
    save(empty(transformers.CLIPTextModel, CLIP_L), folder / "text_encoder", torch.bfloat16)
    save(empty(transformers.T5EncoderModel, T5_XXL), folder / "text_encoder_2", torch.bfloat16)
    tokenizer(77).save_pretrained(folder / "tokenizer")
    tokenizer().save_pretrained(folder / "tokenizer_2")
    return folder


def tokenizer(
    max_length: int = 512,
    squeeze: tuple[str, int] | None = None,
    chat: bool = False,
    characters: int = 1,
    marks: Mapping[str, int] | None = None,
) -> transformers.PreTrainedTokenizerFast:
    """One token per printable character, or unknown ones of several `characters`, and an end token after the text.

    `squeeze` replaces a text by so many blanks: a prompt template is measured in the tokens of the real
    tokenizer, and would otherwise fill the whole window with its characters. `marks` are special tokens by their ids.
    """
    vocab = {token: i for i, token in enumerate(["<s>", "<pad>", "<unk>", "</s>", *string.printable])}
    vocab |= marks or {}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if squeeze is not None:
        core.normalizer = normalizers.Replace(squeeze[0], " " * squeeze[1])
    pieces = Regex(f"[\\s\\S]{{1,{characters}}}") if characters > 1 else ""
    core.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    core.add_special_tokens(list(marks or ()))
    end = ("</s>", vocab["</s>"])
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", unk_token="<unk>", eos_token="</s>",
        model_max_length=max_length, padding_side="right",
    )  # fmt: skip
    if chat:
        wrapped.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return wrapped


def empty(cls: type, config: Mapping[str, Any]) -> Any:
    """Return a module of diffusers or transformers with its parameters on `meta`."""
    with init_empty_weights(include_buffers=False):
        if not issubclass(cls, PreTrainedModel):
            return cls(**config)
        assert cls.config_class is not None, cls
        module = cls(cls.config_class(**config))
    module.tie_weights()
    return module


def save(module: Any, folder: Path, dtype: torch.dtype, shard_size: str = "5GB") -> None:
    """Save a module's config and weights, sharded and named as its library does; tied ones once.

    Tables of floats that its library saves count as weights: Stable Diffusion 3.5 Medium's positions have 0.4 GB.
    """
    if isinstance(module, PreTrainedModel):
        module.config.architectures, module.config.dtype = [type(module).__name__], dtype
        module.config.save_pretrained(folder)
        stem = "model"
    else:
        module.save_config(folder)
        stem = "diffusion_pytorch_model"
    saved = module.state_dict().keys()
    tables = {name: table for name, table in module.named_buffers() if name in saved and table.is_floating_point()}
    tensors = {name: tensor.to(dtype) for name, tensor in {**dict(module.named_parameters()), **tables}.items()}
    pattern = stem + "{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=shard_size)
    for file, names in split.filename_to_tensors.items():
        _write_sparse(folder / file, {name: tensors[name] for name in sorted(names)})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_sparse(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file with a whole header, and zeros that the file system need not store."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = _SAFETENSORS_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
