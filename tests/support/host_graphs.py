"""Graphs in the host's API format: its own encoder and sampler, and this pack's, on the test models."""

from __future__ import annotations

import json
from typing import Any

PROMPT, NEGATIVE = "a (red:1.3) boat", "grey"


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def loaded(kind: str, seed: int = 0, width: int = 32) -> dict[str, Any]:
    return node(f"TestLoad{kind}", seed=seed, width=width)


def seen(*link: Any) -> dict[str, Any]:
    return node("TestSummary", value=list(link))


def encoding(clip: str = "clip", slot: int = 0) -> dict[str, Any]:
    return node("BallastTextEncode", pipeline=[clip, slot], prompt=PROMPT, negative_prompt=NEGATIVE)


def after(value: str, other: str) -> dict[str, Any]:
    """The first output of one node, once another is done."""
    return node("TestAfter", value=[value, 0], after=[other, 0])


def native_run(seed: int = 0, name: str = "native", wait_for: str = "empty") -> dict[str, Any]:
    """The host's UNet and sampler, with prompts that our node has encoded."""
    sampling = {"steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    links = {"model": ["unet", 0], "positive": ["encode", 1], "negative": ["encode", 2]}
    return {
        "clip": loaded("Clip"),
        "encode": encoding(),
        "unet": loaded("Unet"),
        "empty": node("EmptyLatentImage", width=32, height=32, batch_size=1),
        f"before {name}": after("empty", wait_for),
        name: node("KSampler", seed=seed, latent_image=[f"before {name}", 0], **sampling, **links),
        f"seen {name}": seen(name, 0),
    }


def native_timeline() -> dict[str, Any]:
    """The host's own nodes from prompt to picture, and of ours just the report, with its picture."""
    sampling = {"steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0, "seed": 1}
    links = {"model": ["unet", 0], "positive": ["+", 0], "negative": ["-", 0], "latent_image": ["empty", 0]}
    return {
        "clip": loaded("Clip"),
        "unet": loaded("Unet"),
        "vae": loaded("Vae"),
        "+": node("CLIPTextEncode", clip=["clip", 0], text=PROMPT),
        "-": node("CLIPTextEncode", clip=["clip", 0], text=NEGATIVE),
        "empty": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "sampler": node("KSampler", **links, **sampling),
        "decode": node("VAEDecode", vae=["vae", 0], samples=["sampler", 0]),
        "report": node("BallastVRAMReport", after=["decode", 0], stages=12, prompts=1),
        "shown": node("PreviewImage", images=["report", 0]),
    }


def our_run(seed: int = 0, name: str = "sample", wait_for: str = "our encode") -> dict[str, Any]:
    loader = {"pipeline": "demo: shapes", "vram_gb": 0, "dtype": "auto", "keep_loaded": True, "device": "auto"}
    sampling = {"width": 0, "height": 0, "steps": 2, "guidance": 4, "frames": 0, "strategy": "auto"}
    links = {"pipeline": ["load", 0], "conditioning": [f"before {name}", 0]}
    return {
        "load": node("BallastLoadPipeline", **loader),
        "our encode": node("BallastTextEncode", pipeline=["load", 0], prompt="a red circle", negative_prompt=""),
        f"before {name}": after("our encode", wait_for),
        name: node("BallastSampler", seed=seed, **sampling, **links),
        f"seen {name}": seen(name, 0),
    }


def summary(entry: dict[str, Any], name: str) -> Any:
    return json.loads(entry["outputs"][name]["text"][0])
