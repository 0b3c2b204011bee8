"""Tiny models of the host's own classes, with random weights: a CLIP, VAEs for pictures and videos, a UNet."""

from __future__ import annotations

from typing import Any

import torch

WIDTH = 64  # of the CLIP's tokens, and so of what the UNet attends to


def _fill(module: torch.nn.Module, seed: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Random weights for a module, small enough to stay finite, and exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    filled = {}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point() or "sigmas" in name or "alphas" in name:
            continue
        value = torch.randn(tensor.shape, generator=generator) * (0.05 if tensor.ndim > 1 else 0.02)
        if tensor.ndim == 1 and name.endswith("weight"):  # of norms
            value += 1
        filled[name] = value.bfloat16().to(dtype or tensor.dtype)
    return filled


def clip(seed: int = 0, layers: int = 3) -> Any:
    """A CLIP-L with the host's own tokenizer, and few and narrow layers."""
    import comfy.sd
    from comfy import sd1_clip
    from comfy.supported_models_base import ClipTarget

    config = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 2,
        "num_hidden_layers": layers,
        "projection_dim": WIDTH,
    }
    options = {"clip_l_model_config": config}
    model = sd1_clip.SD1ClipModel(device="cpu", dtype=torch.float16, model_options=options)
    weights = _fill(model.clip_l.transformer, seed, torch.float16)
    target = ClipTarget(sd1_clip.SD1Tokenizer, sd1_clip.SD1ClipModel)
    return comfy.sd.CLIP(target, state_dict=[weights], model_options=options)


def vae(seed: int = 0, dtype: torch.dtype | None = None, device: torch.device | None = None, ch: int = 32) -> Any:
    """An AutoencoderKL for pictures, 8 pixels to a latent one."""
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    shape = {
        "double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": ch,
        "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    parameters = {"ddconfig": shape, "embed_dim": 4}
    return comfy.sd.VAE(
        sd=_fill(AutoencoderKL(**parameters), seed, torch.float32),
        config={"params": parameters},
        dtype=dtype,
        device=device,
    )


def frames_vae(dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """A VAE that takes the pictures of a batch for frames of one video, as Stable Video Diffusion's does."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    made = vae(dtype=dtype, device=device)
    shape = {
        "double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32,
        "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    module = AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": shape},
        decoder_config={
            "target": "comfy.ldm.modules.temporal_ae.VideoDecoder",
            "params": {**shape, "video_kernel_size": [3, 1, 1], "alpha": 0.0},
        },
    )
    module.load_state_dict(_fill(module, 0), strict=False)
    made.first_stage_model = module.eval().to(made.vae_dtype)
    devices = {"load_device": made.patcher.load_device, "offload_device": made.patcher.offload_device}
    made.patcher = type(made.patcher)(made.first_stage_model, **devices)
    return made


def video_vae(seed: int = 0, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Wan 2.1's VAE, 4 frames and 8 pixels to a latent one, narrow."""
    import comfy.ldm.wan.vae
    import comfy.sd

    model = comfy.ldm.wan.vae.WanVAE(
        dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True], image_channels=3, conv_out_channels=3, dropout=0.0,
    )  # fmt: skip
    return comfy.sd.VAE(sd=_fill(model, seed, torch.float32), dtype=dtype, device=device)


def unet(
    seed: int = 0, ch: int = 32, dtype: torch.dtype = torch.float32, computes_in: torch.dtype = torch.float32
) -> Any:
    """A UNet as Stable Diffusion 1.5 has it, narrow, with weights of `dtype`."""
    import comfy.model_patcher
    import comfy.supported_models
    from comfy import model_management as mm

    shape = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": ch, "num_res_blocks": [1, 1],
        "channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_middle": 1,
        "transformer_depth_output": [1, 1, 1, 1], "use_spatial_transformer": True, "context_dim": WIDTH,
        "legacy": False, "use_linear_in_transformer": False, "adm_in_channels": None, "use_temporal_attention": False,
        "num_heads": 2, "num_head_channels": -1,
    }  # fmt: skip
    config = comfy.supported_models.SD15(shape)
    config.set_inference_dtype(dtype, None if dtype == computes_in else computes_in)
    model = config.get_model({}, "", device=None)
    model.diffusion_model.load_state_dict(_fill(model.diffusion_model, seed))
    return comfy.model_patcher.CoreModelPatcher(
        model, load_device=mm.get_torch_device(), offload_device=mm.unet_offload_device()
    )


def control(seed: int = 0, ch: int = 32) -> Any:
    """A ControlNet for that UNet, whose output is not zero."""
    import comfy.controlnet
    import comfy.ops
    from comfy import model_management as mm
    from comfy.cldm.cldm import ControlNet

    shape = {
        "image_size": 32, "in_channels": 4, "hint_channels": 3, "model_channels": ch, "num_res_blocks": [1, 1],
        "channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_middle": 1,
        "use_spatial_transformer": True, "context_dim": WIDTH, "legacy": False, "num_heads": 2, "num_head_channels": -1,
    }  # fmt: skip
    module = ControlNet(**shape, dtype=torch.float32, operations=comfy.ops.manual_cast)
    module.load_state_dict(_fill(module, seed))
    return comfy.controlnet.ControlNet(module, load_device=mm.get_torch_device(), manual_cast_dtype=None)


def with_loras(unet: Any, *seeds: int, strength: float = 0.7) -> Any:
    """A clone of a MODEL with as many LoRAs on all its linear layers, as Load LoRA puts them there."""
    import comfy.lora

    patched = unet.clone()
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        state: dict[str, torch.Tensor] = {}
        for name, module in unet.model.diffusion_model.named_modules():
            if isinstance(module, torch.nn.Linear):
                key = f"lora_unet_{name.replace('.', '_')}"
                state[f"{key}.lora_up.weight"] = torch.randn(module.out_features, 4, generator=generator) * 0.1
                state[f"{key}.lora_down.weight"] = torch.randn(4, module.in_features, generator=generator) * 0.1
                state[f"{key}.alpha"] = torch.tensor(4.0)
        keys = {f"lora_unet_{key[16:-7].replace('.', '_')}": key for key in unet.model.state_dict() if "weight" in key}
        if not patched.add_patches(comfy.lora.load_lora(state, keys), strength):
            raise RuntimeError("no LoRA fits this model")
    return patched
