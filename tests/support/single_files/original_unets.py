"""The layers of UNets under the names of Stable Diffusion's own files, as most of its LoRAs have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_TOPS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def published_names(module: nn.Module) -> dict[str, str]:
    """Map the paths of a UNet's layers to their names in published files; empty for other modules."""
    if type(module).__name__ != "UNet2DConditionModel":
        return {}
    starts = dict(_TOPS) | dict(_down(module)) | dict(_up(module))
    found = {}
    for path, _ in module.named_modules():
        start = next((each for each in starts if path == each or path.startswith(f"{each}.")), None)
        if start is not None:
            rest = path[len(start) :].removeprefix(".")
            inner = _RESNET.get(rest, rest) if ".resnets." in start else rest
            found[path] = f"{starts[start]}.{inner}" if inner else starts[start]
    return found


def _down(module: Any) -> Iterator[tuple[str, str]]:
    number = 1
    for i, block in enumerate(module.down_blocks):
        for j in range(len(block.resnets)):
            yield f"down_blocks.{i}.resnets.{j}", f"input_blocks.{number}.0"
            yield f"down_blocks.{i}.attentions.{j}", f"input_blocks.{number}.1"
            number += 1
        if getattr(block, "downsamplers", None):
            yield f"down_blocks.{i}.downsamplers.0.conv", f"input_blocks.{number}.0.op"
            number += 1


def _up(module: Any) -> Iterator[tuple[str, str]]:
    number = 0
    for i, block in enumerate(module.up_blocks):
        attends = hasattr(block, "attentions")
        for j in range(len(block.resnets)):
            yield f"up_blocks.{i}.resnets.{j}", f"output_blocks.{number}.0"
            yield f"up_blocks.{i}.attentions.{j}", f"output_blocks.{number}.1"
            number += 1
        if getattr(block, "upsamplers", None):
            yield f"up_blocks.{i}.upsamplers.0.conv", f"output_blocks.{number - 1}.{2 if attends else 1}.conv"
