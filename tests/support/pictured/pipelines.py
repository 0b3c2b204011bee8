"""Random-weight pipelines that start from pictures: edit models, filling, image to video."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import tiny
import transformers
from diffusers import DiffusionPipeline
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video
from tiny_image import flux, qwenimage, sd3
from tiny_parts import MULTIMODAL_ROPE, decoder_sizes, tokenizer
from tiny_video import cogvideox, hunyuan_video, hunyuan_video15, wan
from tokenizers import normalizers

_VISION = {"num_hidden_layers": 2, "num_attention_heads": 2}


def _parts(pipe: DiffusionPipeline, *without: str) -> dict:
    return {name: part for name, part in pipe.components.items() if name not in without}


def _config(model: diffusers.ModelMixin) -> dict:
    return {name: value for name, value in model.config.items() if not name.startswith("_")}


def kontext() -> DiffusionPipeline:
    """Takes a picture, or two side by side, as further tokens."""
    return diffusers.FluxKontextPipeline(**_parts(flux()))


def flux_fill() -> DiffusionPipeline:
    """Its transformer is given the masked picture and the mask with each token."""
    parts = _parts(flux(), "image_encoder", "feature_extractor")
    config = _config(parts["transformer"]) | {"in_channels": 16 + 16 + 256, "out_channels": 16}
    parts["transformer"] = diffusers.FluxTransformer2DModel.from_config(config)
    return diffusers.FluxFillPipeline(**parts)


def flux_control() -> DiffusionPipeline:
    """FLUX.1 Canny and Depth: its transformer is given the control picture with each token."""
    parts = _parts(flux(), "image_encoder", "feature_extractor")
    config = _config(parts["transformer"]) | {"in_channels": 16 + 16, "out_channels": 16}
    parts["transformer"] = diffusers.FluxTransformer2DModel.from_config(config)
    return diffusers.FluxControlPipeline(**parts)


def flux_controlnet() -> DiffusionPipeline:
    """A second model runs before the transformer in each step."""
    parts = _parts(flux())
    config = _config(parts["transformer"]) | {"num_layers": 1, "num_single_layers": 1}
    config.pop("out_channels", None)
    return diffusers.FluxControlNetPipeline(**parts, controlnet=diffusers.FluxControlNetModel.from_config(config))


def sd3_16() -> DiffusionPipeline:
    """As many channels as its inpainting asks for."""
    from tiny_parts import autoencoder

    pipe = sd3()
    config = _config(pipe.transformer) | {"in_channels": 16, "out_channels": 16}
    parts = _parts(pipe) | {"transformer": diffusers.SD3Transformer2DModel.from_config(config)}
    return diffusers.StableDiffusion3Pipeline(**parts | {"vae": autoencoder(latent_channels=16)})


def wan_i2v(**more: int) -> DiffusionPipeline:
    """Wan 2.1: an image encoder sees the first frame, too."""
    pipe = wan()
    config = _config(pipe.transformer) | {"in_channels": 16 + 16 + 4, "image_dim": 16, **more}
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, projection_dim=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return diffusers.WanImageToVideoPipeline(
        **_parts(pipe, "transformer", "transformer_2"),
        transformer=diffusers.WanTransformer3DModel.from_config(config),
        image_encoder=transformers.CLIPVisionModel(vision),
        image_processor=transformers.CLIPImageProcessor(crop_size=32, size=32),
    )


def wan_flf() -> DiffusionPipeline:
    """Wan 2.1 of a first and a last frame, each of 17 tokens."""
    return wan_i2v(pos_embed_seq_len=2 * 17)


def wan_ti2v() -> DiffusionPipeline:
    """Wan 2.2 5B: one transformer for text and for pictures, whose first frame has no noise."""
    return diffusers.WanPipeline(**_parts(wan(), "transformer_2"), expand_timesteps=True)


def cogvideox_i2v() -> DiffusionPipeline:
    pipe = cogvideox()
    config = _config(pipe.transformer) | {"in_channels": 8}
    parts = _parts(pipe) | {"transformer": diffusers.CogVideoXTransformer3DModel.from_config(config)}
    return diffusers.CogVideoXImageToVideoPipeline(**parts)


@contextmanager
def without_videos() -> Iterator[None]:
    """Let Qwen's processor be without its part for videos, which needs torchvision and which no pipeline asks."""
    kind = transformers.Qwen2_5_VLProcessor

    def made(self: Any, image_processor: Any = None, tokenizer: Any = None, **more: Any) -> None:
        for name in ("image", "video"):
            setattr(self, f"{name}_token", f"<|{name}_pad|>")
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
        super(kind, self).__init__(image_processor, tokenizer, **more)

    with mock.patch.object(kind, "__init__", made):
        yield


def qwen_edit(several: bool = False) -> DiffusionPipeline:
    """The picture goes to the text encoder, too."""
    parts = _parts(qwenimage())
    cls = diffusers.QwenImageEditPlusPipeline if several else diffusers.QwenImageEditPipeline
    words = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    read = tokenizer()
    read.add_special_tokens({"additional_special_tokens": words})
    ids = dict(zip(words, read.convert_tokens_to_ids(words), strict=True))
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=decoder_sizes(rope_parameters=MULTIMODAL_ROPE),
        vision_config=vision,
        vocab_size=128,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    parts["text_encoder"] = transformers.Qwen2_5_VLForConditionalGeneration(config)
    seeing = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=4 * 28 * 28)
    with without_videos():
        processor = transformers.Qwen2_5_VLProcessor(image_processor=seeing, tokenizer=read)
    return cls(**parts | {"tokenizer": read, "processor": processor})


def hunyuan_video15_i2v() -> DiffusionPipeline:
    """An image encoder sees the first frame, which says how large the video is."""
    pipe = hunyuan_video15()
    config = _config(pipe.transformer) | {"task_type": "i2v", "target_size": 64}
    vision = {**_VISION, "image_size": 32, "patch_size": 8, "hidden_size": 12, "intermediate_size": 16}
    made = diffusers.HunyuanVideo15ImageToVideoPipeline(
        **_parts(pipe, "transformer"),
        transformer=diffusers.HunyuanVideo15Transformer3DModel.from_config(config),
        image_encoder=transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision)),
        feature_extractor=transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
    )
    made.tokenizer = pipe.tokenizer
    return made


def hunyuan_video_i2v() -> DiffusionPipeline:
    """The first frame goes to the text encoder as 576 tokens, and to the transformer as latents."""
    template = pipeline_hunyuan_video_image2video.DEFAULT_PROMPT_TEMPLATE
    words = template["template"].split("<image>")[1].split("<|eot_id|>")[0]
    read = tokenizer(1024, (words, 86))  # so that the prompt begins where it does with the real one
    replaced = normalizers.Sequence([read.backend_tokenizer.normalizer, normalizers.Replace("system", " ")])
    read.backend_tokenizer.normalizer = replaced
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"]
    read.add_special_tokens({"additional_special_tokens": marks})
    vision = transformers.CLIPVisionConfig(
        **_VISION, hidden_size=16, intermediate_size=24, projection_dim=16, image_size=48, patch_size=2
    )
    text = transformers.LlamaConfig(**decoder_sizes(layers=4))
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=read.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        pad_token_id=1,
    )
    pipe = hunyuan_video()
    shape = _config(pipe.transformer) | {"image_condition_type": "token_replace"}
    return diffusers.HunyuanVideoImageToVideoPipeline(
        **_parts(pipe, "transformer", "text_encoder", "tokenizer"),
        text_encoder=transformers.LlavaForConditionalGeneration(config),
        tokenizer=read,
        transformer=diffusers.HunyuanVideoTransformer3DModel.from_config(shape),
        image_processor=transformers.CLIPImageProcessor(
            crop_size={"height": 48, "width": 48}, size={"shortest_edge": 48}
        ),
    )


BUILDERS: dict[str, Callable[[], DiffusionPipeline]] = {
    build.__name__: build
    for build in (
        hunyuan_video15_i2v,
        hunyuan_video_i2v,
        kontext,
        flux_fill,
        flux_control,
        flux_controlnet,
        sd3_16,
        wan_i2v,
        wan_flf,
        wan_ti2v,
        cogvideox_i2v,
        qwen_edit,
    )
}


def save(name: str, folder: Path) -> Path:
    """Write the pipeline in the diffusers layout, with no weight that is zero, and return the folder."""
    tiny.seeded(BUILDERS[name])().save_pretrained(folder, safe_serialization=True)
    return folder


def folders_in(root: Path, tiny_folders: Callable[[str], Path]) -> Callable[[str], Path]:
    """The folder of a tiny family, or of one of these, made when it is first asked for."""

    def folder(name: str) -> Path:
        if name in tiny.FAMILIES:
            return tiny_folders(name)
        return root / name if (root / name).is_dir() else save(name, root / name)

    return folder
