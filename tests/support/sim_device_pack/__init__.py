"""A node pack for tests: the simulated device as ComfyUI's own, over HTTP, and nodes with tiny models of its classes.

`POST /sim_device {"total": "64MB"}` switches, with `"weights": 0.0` to what the host does on cards of NVIDIA. `GET
/sim_device` says what the card holds, `GET /sim_device/ram` how much RAM the process does, without what only waits to
be used again, `GET /sim_device/host` what ComfyUI's modules and classes hold, for whoever asks whether that changes.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from comfy import model_management
from server import PromptServer

from . import models
from .switch import facts, switch


async def enable(request: Any) -> Any:
    asked = await request.json()
    switch(asked["total"])
    if "weights" in asked:
        model_management.MIN_WEIGHT_MEMORY_RATIO = asked["weights"]
    return web.json_response(facts())


async def tell(request: Any) -> Any:
    return web.json_response(facts())


async def tell_ram(request: Any) -> Any:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text("utf-8")
    kilobytes = next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]
    return web.json_response({"bytes": 1024 * int(kilobytes)})


async def tell_host(request: Any) -> Any:
    found = {}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "comfy"]:
        for name, value in vars(module).items():
            owned = vars(value) if isinstance(value, type) and value.__module__ == module.__name__ else {}
            parts = {name: value} | {f"{name}.{part}": each for part, each in owned.items()}
            found |= {f"{module.__name__}.{part}": id(each) for part, each in parts.items() if callable(each)}
    return web.json_response(found)


if server := getattr(PromptServer, "instance", None):  # not there in a test that has no server
    server.routes.post("/sim_device")(enable)
    server.routes.get("/sim_device")(tell)
    server.routes.get("/sim_device/ram")(tell_ram)
    server.routes.get("/sim_device/host")(tell_host)


def summary(value: Any) -> Any:
    """Plain data and tensors as JSON, tensors as a digest of type, shape and content with their device."""
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(content).hexdigest()[:16]
        about = f"mean {value.float().mean():.3f}, spread {value.float().std(correction=0):.3f}"
        return f"{str(value.dtype)[6:]} {list(value.shape)} {digest} on {value.device.type}; {about}"
    if isinstance(value, dict):
        return {str(key): summary(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [summary(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


class _Loader:
    CATEGORY = "test"
    FUNCTION = "load"
    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"seed": ("INT", {"default": 0}), "width": ("INT", {"default": 32})}}
    )


class LoadClip(_Loader):
    RETURN_TYPES = ("CLIP",)

    def load(self, seed: int, width: int) -> tuple[Any]:
        return (models.clip(seed),)


class LoadVae(_Loader):
    RETURN_TYPES = ("VAE",)

    def load(self, seed: int, width: int) -> tuple[Any]:
        return (models.vae(seed, ch=width),)


class LoadVideoVae(_Loader):
    RETURN_TYPES = ("VAE",)

    def load(self, seed: int, width: int) -> tuple[Any]:
        return (models.video_vae(seed),)


class LoadUnet(_Loader):
    RETURN_TYPES = ("MODEL",)

    def load(self, seed: int, width: int) -> tuple[Any]:
        return (models.unet(seed, width),)


class LoadHalfUnet(_Loader):
    """In bfloat16, in which it computes too."""

    RETURN_TYPES = ("MODEL",)

    def load(self, seed: int, width: int) -> tuple[Any]:
        unet = models.unet(seed, width, torch.bfloat16, torch.bfloat16)
        unet.model.memory_usage_factor = 0.06  # which is right for this one
        return (unet,)


class LoadControl(_Loader):
    RETURN_TYPES = ("CONTROL_NET",)

    def load(self, seed: int, width: int) -> tuple[Any]:
        return (models.control(seed, width),)


class AddLora:
    """As Load LoRA, with one that is made of a seed."""

    CATEGORY = "test"
    FUNCTION = "add"
    RETURN_TYPES = ("MODEL",)
    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"model": ("MODEL", {}), "seed": ("INT", {}), "strength": ("FLOAT", {})}}
    )

    def add(self, model: Any, seed: int, strength: float) -> tuple[Any]:
        return (models.with_loras(model, seed, strength=strength),)


class After:
    """Hands a value on once something else is ready."""

    CATEGORY = "test"
    FUNCTION = "wait"
    RETURN_TYPES = ("*",)
    INPUT_TYPES = classmethod(lambda cls: {"required": {"value": ("*", {}), "after": ("*", {})}})
    VALIDATE_INPUTS = classmethod(lambda cls, input_types: True)

    def wait(self, value: Any, after: Any) -> tuple[Any]:
        return (value,)


class Summary:
    """Writes what a socket carried, and what the card held then, where /history shows it."""

    CATEGORY = "test"
    FUNCTION = "tell"
    OUTPUT_NODE = True
    RETURN_TYPES = ()
    INPUT_TYPES = classmethod(lambda cls: {"required": {"value": ("*", {})}})
    VALIDATE_INPUTS = classmethod(lambda cls, input_types: True)

    def tell(self, value: Any) -> dict[str, Any]:
        return {"ui": {"text": [json.dumps(summary(value))], "device": [facts()]}}


NODE_CLASS_MAPPINGS = {
    "TestLoadClip": LoadClip,
    "TestLoadVae": LoadVae,
    "TestLoadVideoVae": LoadVideoVae,
    "TestLoadUnet": LoadUnet,
    "TestLoadHalfUnet": LoadHalfUnet,
    "TestLoadControl": LoadControl,
    "TestAddLora": AddLora,
    "TestAfter": After,
    "TestSummary": Summary,
}
