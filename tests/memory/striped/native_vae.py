"""Decodes and encodes with a real ComfyUI's own VAEs, whole and in stripes, and prints by how much pixels differ.

Run as `python native_vae.py COMFYUI_FOLDER`, by an interpreter that has what ComfyUI imports.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from places import ROOT

SIZES = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip


def import_pack() -> None:
    spec = importlib.util.spec_from_file_location(
        "ballast", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec and spec.loader
    sys.modules["ballast"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["ballast"])


def with_weights(vae: torch.nn.Module) -> Any:
    for parameter in vae.parameters():
        torch.nn.init.normal_(parameter, std=0.1, mean=0.0 if parameter.dim() > 1 else 0.5)
    return vae.eval().requires_grad_(False)


def difference(work: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> float:
    from ballast.memory import striped

    with torch.inference_mode():
        whole = work(given)
    found = striped.run(work, given, device="cpu", budget_bytes=300_000)
    return float((found - whole).abs().max())


def main(host: str) -> None:
    sys.path.insert(0, host)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.ldm.modules.diffusionmodules.model as layers
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
    from comfy.ldm.wan.vae import WanVAE

    torch.manual_seed(0)
    found = {}
    vae = with_weights(AutoencoderKL(embed_dim=4, ddconfig=SIZES))
    found["split attention"] = difference(vae.decode, torch.randn(2, 4, 9, 7))
    vae.decoder.mid.attn_1.optimized_attention = layers.pytorch_attention
    found["pictures"] = difference(vae.decode, torch.randn(2, 4, 9, 7))
    found["encoding"] = difference(vae.encode, torch.rand(1, 3, 72, 56))
    wan = with_weights(WanVAE(dim=8, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1,
                              temperal_downsample=[False, True, True]))  # fmt: skip
    found["Wan"] = difference(wan.decode, torch.randn(1, 4, 3, 5, 7))
    here = "comfy.ldm.modules.diffusionmodules.model"
    sides = {
        f"{side.lower()}_config": {"target": f"{here}.{side}", "params": {**SIZES, "conv3d": True, "time_compress": 4}}
        for side in ("Encoder", "Decoder")
    }
    regularizer = {"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"}
    video = with_weights(AutoencodingEngine(**sides, regularizer_config=regularizer))
    found["video"] = difference(video.decoder, torch.randn(1, 4, 3, 5, 7))
    print(json.dumps(found))


if __name__ == "__main__":
    import_pack()
    main(sys.argv[1])
