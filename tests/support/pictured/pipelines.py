"""Random-weight pipelines that start from pictures: edit models, filling, image to video."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import tiny
import transformers
from diffusers import DiffusionPipeline
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video
from tiny_image import flux, qwenimage, sd3
from tiny_parts import MULTIMODAL_ROPE, decoder_sizes, flow, tokenizer
from tiny_video import cogvideox, hunyuan_video, hunyuan_video15, wan
from tokenizers import normalizers
from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2EncoderConfig
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

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


def sd3_controlnet() -> DiffusionPipeline:
    """Its ControlNet is built as its transformer, with fewer blocks."""
    parts = _parts(sd3())
    config = _config(parts["transformer"]) | {"num_layers": 1}
    controlnet = diffusers.SD3ControlNetModel.from_config(config)
    return diffusers.StableDiffusion3ControlNetPipeline(**parts, controlnet=controlnet)


def qwen_controlnet() -> DiffusionPipeline:
    parts = _parts(qwenimage())
    config = _config(parts["transformer"]) | {"num_layers": 1}
    controlnet = diffusers.QwenImageControlNetModel.from_config(config)
    return diffusers.QwenImageControlNetPipeline(**parts, controlnet=controlnet)


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
    kinds = (transformers.Qwen2_5_VLProcessor, transformers.Qwen3VLProcessor)

    def made(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **more: Any
    ) -> None:
        for name in ("image", "video", "vision_start", "vision_end"):
            word = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
            setattr(self, f"{name}_token", word)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(word))
        kind = next(kind for kind in kinds if isinstance(self, kind))
        super(kind, self).__init__(image_processor, tokenizer, chat_template=chat_template, **more)

    with ExitStack() as exits:
        for kind in kinds:
            exits.enter_context(mock.patch.object(kind, "__init__", made))
        yield


def _reads_pictures() -> tuple[transformers.PreTrainedTokenizerFast, dict[str, int]]:
    """A tokenizer with Qwen's words for pictures, and the ids of these by their names in a config."""
    words = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    read = tokenizer()
    read.add_special_tokens({"additional_special_tokens": words})
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    return read, dict(zip(names, read.convert_tokens_to_ids(words), strict=True))


def qwen_edit(cls: Any = diffusers.QwenImageEditPipeline) -> DiffusionPipeline:
    """The picture goes to the text encoder, too."""
    parts = _parts(qwenimage())
    read, ids = _reads_pictures()
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=decoder_sizes(rope_parameters=MULTIMODAL_ROPE),
        vision_config=vision,
        vocab_size=128,
        **ids,
    )
    parts["text_encoder"] = transformers.Qwen2_5_VLForConditionalGeneration(config)
    seeing = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=4 * 28 * 28)
    with without_videos():
        processor = transformers.Qwen2_5_VLProcessor(image_processor=seeing, tokenizer=read)
    return cls(**parts | {"tokenizer": read, "processor": processor})


def qwen_layered() -> DiffusionPipeline:
    """Gives a list of each picture's layers."""
    return qwen_edit(diffusers.QwenImageLayeredPipeline)


def joy(several: bool = False) -> DiffusionPipeline:
    """Looks into its text encoder by a hook; with `several` pictures it has no method of the usual name."""
    read, ids = _reads_pictures()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen3VLConfig(
        text_config={**decoder_sizes(), "head_dim": 8, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
            "deepstack_visual_indexes": [1], "num_position_embeddings": 16,
        },
        vocab_size=128,
        **ids,
    )  # fmt: skip
    seeing = transformers.Qwen2VLImageProcessor(min_pixels=32 * 32, max_pixels=4 * 32 * 32, patch_size=16)
    with without_videos():
        processor = transformers.Qwen3VLProcessor(image_processor=seeing, tokenizer=read)
    kind = diffusers.JoyImageEditPlusTransformer3DModel if several else diffusers.JoyImageEditTransformer3DModel
    cls = diffusers.JoyImageEditPlusPipeline if several else diffusers.JoyImageEditPipeline
    return cls(
        scheduler=flow(),
        vae=wan().vae,
        text_encoder=transformers.Qwen3VLForConditionalGeneration(config),
        tokenizer=read,
        transformer=kind(
            patch_size=[1, 2, 2],
            in_channels=16,
            hidden_size=32,
            num_attention_heads=2,
            text_dim=16,
            num_layers=2,
            rope_dim_list=[4, 6, 6],
            theta=256,
        ),
        processor=processor,
    )


def joy_plus() -> DiffusionPipeline:
    return joy(several=True)


def motif_i2v() -> DiffusionPipeline:
    """A part of its text encoder sees the first frame."""
    text = {**decoder_sizes(32), "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 128, "dropout_rate": 0.0}
    vision = {**_VISION, "hidden_size": 8, "intermediate_size": 16, "image_size": 32, "patch_size": 8}
    return diffusers.MotifVideoImage2VideoPipeline(
        scheduler=flow(),
        vae=wan().vae,
        text_encoder=T5Gemma2Encoder(T5Gemma2EncoderConfig(text_config=text, vision_config=vision)),
        tokenizer=tokenizer(),
        feature_extractor=transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
        transformer=diffusers.MotifVideoTransformer3DModel(
            in_channels=33,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_single_layers=1,
            patch_size=1,
            patch_size_t=1,
            text_embed_dim=32,
            image_embed_dim=8,
            rope_axes_dim=(4, 4, 4),
        ),
        guider=diffusers.AdaptiveProjectedGuidance(),
    )


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
        sd3_controlnet,
        qwen_controlnet,
        sd3_16,
        wan_i2v,
        wan_flf,
        wan_ti2v,
        cogvideox_i2v,
        qwen_edit,
        qwen_layered,
        joy,
        joy_plus,
        motif_i2v,
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
