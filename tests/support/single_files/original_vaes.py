"""Tiny VAEs under the names of their original files: converters inverted."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from .original_names import original_vae

State = dict[str, torch.Tensor]


def original_flux2_vae(state: State) -> State:
    """The tensors of an `AutoencoderKLFlux2` as the file of FLUX.2 has them."""
    names = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
    return _by_start(original_vae(state), names)


def original_dc_vae(state: State) -> State:
    """The tensors of an `AutoencoderDC` as the file of its makers has them."""
    state = dict(state)
    for name in [name for name in state if name.endswith(".to_q.weight")]:
        stem = name.removesuffix("to_q.weight")
        joined = torch.cat([state.pop(f"{stem}to_{part}.weight") for part in "qkv"])
        state[f"{stem}qkv.conv.weight"] = joined[:, :, None, None]
    made = {}
    for name, tensor in state.items():
        side, kind, *rest = name.split(".")
        if kind in ("down_blocks", "up_blocks"):
            stage, place, part, *last = rest
            inner = ".".join([part, *last])
            if part == "attn":
                inner = "context_module.main." + ".".join(last)
            elif part == "conv_out":
                inner = "local_module.main." + ".".join(last)
            else:
                inner = "main." + inner
            name = f"{side}.stages.{stage}.op_list.{place}.{inner}"
        for ours, theirs in _DC_PARTS.items():
            name = name.replace(ours, theirs)
        made[name] = tensor[:, :, None, None] if name.endswith(".proj.conv.weight") else tensor
    return made


_DC_PARTS = {
    "encoder.conv_in.": "encoder.project_in.conv.",
    "encoder.conv_out.": "encoder.project_out.0.conv.",
    "decoder.conv_in.": "decoder.project_in.conv.",
    "decoder.norm_out.": "decoder.project_out.0.",
    "decoder.conv_out.": "decoder.project_out.2.conv.",
    "to_qkv_multiscale.0.proj_in": "aggreg.0.0",
    "to_qkv_multiscale.0.proj_out": "aggreg.0.1",
    "main.to_out.": "main.proj.conv.",
    "main.norm_out.": "main.proj.norm.",
    "local_module.main.norm.": "local_module.main.point_conv.norm.",
    "main.conv_inverted.": "main.inverted_conv.conv.",
    "main.conv_depth.": "main.depth_conv.conv.",
    "main.conv_point.": "main.point_conv.conv.",
    "main.conv1.": "main.conv1.conv.",
    "main.conv2.": "main.conv2.conv.",
    "main.norm.": "main.conv2.norm.",
    "main.conv.": "main.conv.conv.",
}

# LTX-Video's VAE by its version: what is other than in the first, and the order of the blocks in its file.
_FIRST_DOWN = {
    "encoder.down_blocks.0.": 0, "encoder.down_blocks.0.downsamplers.0.": 1, "encoder.down_blocks.0.conv_out.": 2,
    "encoder.down_blocks.1.": 3, "encoder.down_blocks.1.downsamplers.0.": 4, "encoder.down_blocks.1.conv_out.": 5,
    "encoder.down_blocks.2.": 6, "encoder.down_blocks.2.downsamplers.0.": 7, "encoder.down_blocks.3.": 8,
    "encoder.mid_block.": 9,
}  # fmt: skip
_LATER_DOWN = {"encoder.mid_block.": 8} | {
    f"encoder.down_blocks.{i}.{part}": 2 * i + at for i in range(4) for at, part in enumerate(("", "downsamplers.0."))
}
_FIRST_UP = {
    "decoder.mid_block.": 0, "decoder.up_blocks.0.": 1, "decoder.up_blocks.1.upsamplers.0.": 2,
    "decoder.up_blocks.1.": 3, "decoder.up_blocks.2.conv_in.": 4, "decoder.up_blocks.2.upsamplers.0.": 5,
    "decoder.up_blocks.2.": 6, "decoder.up_blocks.3.conv_in.": 7, "decoder.up_blocks.3.upsamplers.0.": 8,
    "decoder.up_blocks.3.": 9,
}  # fmt: skip
_LATER_UP = {"decoder.mid_block.": 0} | {
    f"decoder.up_blocks.{i}.{part}": 2 * i + at + 1 for i in range(3) for at, part in enumerate(("upsamplers.0.", ""))
}
_EARLY: dict[str, Any] = {
    "block_out_channels": (4, 8, 16, 16), "decoder_block_out_channels": (4, 8, 16, 16),
    "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5,
}  # fmt: skip
_MADE_LATER: dict[str, Any] = {
    "decoder_block_out_channels": (4, 8, 16), "decoder_layers_per_block": (1,) * 4,
    "decoder_spatio_temporal_scaling": (True,) * 3, "upsample_residual": (True,) * 3, "upsample_factor": (2,) * 3,
    "timestep_conditioning": True,
}  # fmt: skip
LTX_VAES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, int]]] = {
    "0.9": (_EARLY, _FIRST_DOWN, _FIRST_UP),
    "0.9.1": (_EARLY | _MADE_LATER | {"decoder_inject_noise": (True,) * 3 + (False,)}, _FIRST_DOWN, _LATER_UP),
    "0.9.5": (
        _MADE_LATER
        | {
            "block_out_channels": (4, 8, 8, 8, 2048),  # by which diffusers' converter knows it
            "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
            "layers_per_block": (1, 1, 1, 1, 0),
            "spatio_temporal_scaling": (True,) * 4,
            "decoder_inject_noise": (False,) * 4,
            "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        },
        _LATER_DOWN,
        _LATER_UP,
    ),
}


def ltx_vae(version: str) -> Any:
    """A tiny VAE of LTX-Video, of one of LTX_VAES."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLLTXVideo(latent_channels=4, patch_size=4, **LTX_VAES[version][0])
    vae.latents_mean.normal_()
    vae.latents_std.uniform_(0.5, 1.5)
    return vae.eval().requires_grad_(False)


def original_ltx_vae(state: State, version: str) -> State:
    """Its tensors as the file of that version has them, with the statistics that nothing reads."""
    _, down, up = LTX_VAES[version]
    names = {ours: f"encoder.down_blocks.{at}." for ours, at in down.items()}
    names |= {ours: f"decoder.up_blocks.{at}." for ours, at in up.items()}
    names |= {
        "latents_mean": "per_channel_statistics.mean-of-means",
        "latents_std": "per_channel_statistics.std-of-means",
        "decoder.time_embedder.": "decoder.last_time_embedder.",
        "decoder.scale_shift_table": "decoder.last_scale_shift_table",
    }
    made = {}
    for name, tensor in _by_start(state, names).items():
        name = name.replace("resnets", "res_blocks").replace("conv_shortcut.conv.", "conv_shortcut.")
        made[name.replace("norm3.", "norm3.norm.")] = tensor
    unread = ("channel", "mean-of-stds", "mean-of-stds_over_std-of-means")
    return made | {f"per_channel_statistics.{name}": torch.ones(4) for name in unread}


def _by_start(state: State, names: dict[str, str]) -> State:
    """With the longest of these beginnings replaced."""
    made = {}
    for name, tensor in state.items():
        start = max((each for each in names if name.startswith(each)), key=len, default="")
        made[names[start] + name.removeprefix(start) if start else name] = tensor
    return made
