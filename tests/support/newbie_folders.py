"""A tiny NewBie under the published key names, in the three layouts that it is published in."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import places
import pytest
import torch
import transformers
from diffusers.loaders.single_file_utils import convert_lumina2_to_diffusers
from safetensors.torch import load_file, save_file
from tiny_parts import tokenizer

DATA = places.DATA / "newbie"
POOLED = 64
XML = "<character_1>\n  <n>$character_1$</n>\n  <gender>1girl</gender>\n</character_1>"
GEMMA = {
    "hidden_size": 20,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 128,
    "sliding_window": 1024,
}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
JINA = {"vocab_size": 128, "hidden_size": POOLED, "num_hidden_layers": 2, "num_attention_heads": 1}
JINA |= {"intermediate_size": 80}


def transformer() -> dict[str, torch.Tensor]:
    """The golden weights, with a pooled feature as wide as the tiny tower's."""
    weights = load_file(DATA / "transformer.safetensors")
    generator = torch.Generator().manual_seed(1)
    width = weights["time_text_embed.1.bias"].numel()
    shapes = {"clip_text_pooled_proj.0.weight": (POOLED,), "clip_text_pooled_proj.1.weight": (POOLED, POOLED)}
    shapes |= {"clip_text_pooled_proj.1.bias": (POOLED,), "time_text_embed.1.weight": (width, width + POOLED)}
    return weights | {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def transformer_config() -> dict[str, Any]:
    config = json.loads((DATA / "transformer.config.json").read_text("utf-8"))
    return config | {"clip_text_dim": POOLED, "model_type": "nextdit_clip", "axes_lens": [1024, 64, 64]}


def gemma() -> Any:
    config = transformers.Gemma3Config(
        text_config=GEMMA, vision_config=VISION | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return transformers.Gemma3ForConditionalGeneration(config).eval()


def jina() -> dict[str, torch.Tensor]:
    """Random weights under the names of the golden tower, of other sizes."""
    golden = json.loads((DATA / "jina_text_tower.config.json").read_text("utf-8"))
    sizes = {golden[key]: JINA[key] for key in ("vocab_size", "intermediate_size", "hidden_size")}
    sizes |= {3 * golden["hidden_size"]: 3 * JINA["hidden_size"]}
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.3 * torch.randn([sizes.get(size, size) for size in weight.shape], generator=generator)
        for name, weight in load_file(DATA / "jina_text_tower.safetensors").items()
        if "layers.2." not in name
    }


def vae() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return diffusers.AutoencoderKL(
            sample_size=64,
            block_out_channels=(32, 32, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            latent_channels=16,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ).eval()


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def official(folder: Path) -> Path:
    """transformer/, text_encoder/, clip_model/, vae/; the tokenizers lie beside the encoders."""
    for part in ("transformer", "clip_model"):
        (folder / part).mkdir(parents=True)
    write_json(folder / "model_index.json", {"_class_name": "NewbiePipeline"})
    write_json(folder / "transformer" / "config.json", transformer_config())
    save_file(transformer(), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    gemma().save_pretrained(folder / "text_encoder")
    tokenizer().save_pretrained(folder / "text_encoder")
    write_json(folder / "clip_model" / "config.json", JINA)
    save_file(jina(), folder / "clip_model" / "model.safetensors")
    tokenizer().save_pretrained(folder / "clip_model")
    vae().save_pretrained(folder / "vae")
    return folder


def diffusers_style(folder: Path, source: Path) -> Path:
    """transformer/ with diffusers' names, text_encoder/, text_encoder_2/, their tokenizers, scheduler/, vae/."""
    (folder / "transformer").mkdir(parents=True)
    config = transformer_config()
    weights = {name: value.clone() for name, value in transformer().items()}
    converted: dict[str, torch.Tensor] = {}
    queries = config["dim"]
    for name, value in weights.items():  # the converter splits the published sizes only
        if ".qkv." in name:
            parts = value.split([queries, (len(value) - queries) // 2, (len(value) - queries) // 2])
            converted |= {
                name.replace("qkv", part): v.clone() for part, v in zip(("to_q", "to_k", "to_v"), parts, strict=True)
            }
        else:
            converted[name] = value
    save_file(convert_lumina2_to_diffusers(converted), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    words = {
        "dim": "hidden_size",
        "n_layers": "num_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_kv_heads",
    }
    words |= {"axes_dims": "axes_dim_rope", "clip_text_dim": "pooled_projection_dim", "cap_feat_dim": "cap_feat_dim"}
    words |= {"axes_lens": "axes_lens", "in_channels": "in_channels", "multiple_of": "multiple_of"}
    own = {theirs: config[ours] for ours, theirs in words.items()} | {"_class_name": "Lumina2Transformer2DModel"}
    write_json(folder / "transformer" / "config.json", own)
    for part, name in (("text_encoder", "text_encoder"), ("clip_model", "text_encoder_2"), ("vae", "vae")):
        shutil.copytree(source / part, folder / name, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    tokenizer().save_pretrained(folder / "tokenizer")
    tokenizer().save_pretrained(folder / "tokenizer_2")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0).save_pretrained(folder / "scheduler")
    write_json(folder / "model_index.json", {"_class_name": "NewbiePipeline", "scheduler": ["diffusers", "x"]})
    return folder


def split_files(folder: Path, source: Path) -> dict[str, Path]:
    """The four files that ComfyUI has in models/diffusion_models, models/text_encoders and models/vae."""
    for name in ("diffusion_models", "text_encoders", "vae"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    files = {
        "transformer": folder / "diffusion_models" / "NewBie-Image-Exp0.1-bf16.safetensors",
        "gemma": folder / "text_encoders" / "gemma_3_4b_it_bf16.safetensors",
        "jina": folder / "text_encoders" / "jina_clip_v2_bf16.safetensors",
        "vae": folder / "vae" / "ae.safetensors",
    }
    save_file(transformer(), files["transformer"])
    language = {
        f"model.{name}": value.contiguous() for name, value in gemma().model.language_model.state_dict().items()
    }
    save_file(language, files["gemma"])
    save_file(jina(), files["jina"])
    weights = load_file(source / "vae" / "diffusion_pytorch_model.safetensors")
    save_file({original(name): _as_convolution(name, value) for name, value in weights.items()}, files["vae"])
    return files


def original(name: str, levels: int = 4) -> str:
    """The name that the VAE's own repository has for a weight."""
    parts = name.split(".")
    if parts[1] == "down_blocks":
        parts[1:4] = ["down", parts[2], "block" if parts[3] == "resnets" else "downsample"]
        if parts[3] == "downsample":
            del parts[4]
    elif parts[1] == "up_blocks":
        parts[1:4] = ["up", str(levels - 1 - int(parts[2])), "block" if parts[3] == "resnets" else "upsample"]
        if parts[3] == "upsample":
            del parts[4]
    elif parts[1] == "mid_block":
        parts[1:4] = ["mid", f"block_{int(parts[3]) + 1}" if parts[2] == "resnets" else f"attn_{int(parts[3]) + 1}"]
    joined = ".".join(parts)
    for ours, theirs in (
        ("conv_shortcut", "nin_shortcut"), ("conv_norm_out", "norm_out"), ("group_norm", "norm"), ("to_q", "q"),
        ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out"),
    ):  # fmt: skip
        joined = joined.replace(ours, theirs)
    return joined


def _as_convolution(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight[:, :, None, None].contiguous() if ".attentions." in name and weight.ndim == 2 else weight


def piece_file(path: Path, **ids: Any) -> Path:
    """A file of ComfyUI's kind with a small tokenizer in it."""
    trainer = pytest.importorskip("sentencepiece", reason="the sentencepiece package is not installed")
    model = io.BytesIO()
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter(["a cat sat on the mat", "<n>the dog</n> and the cat", XML]),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **ids,
    )
    blob = torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8)
    save_file({"spiece_model": blob, "model.norm.weight": torch.ones(4)}, path)
    return path
