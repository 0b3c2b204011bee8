"""A node pack for tests: the simulated device as ComfyUI's own, over HTTP, and nodes with tiny models of its classes.

`POST /sim_device {"total": "64MB"}` switches; `GET /sim_device` says what the card holds, `GET /sim_device/ram` how
much RAM the process does, without what only waits to be used again.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from server import PromptServer

from . import models
from .switch import facts, switch


async def enable(request: Any) -> Any:
    switch((await request.json())["total"])
    return web.json_response(facts())


async def tell(request: Any) -> Any:
    return web.json_response(facts())


async def tell_ram(request: Any) -> Any:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text("utf-8")
    kilobytes = next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]
    return web.json_response({"bytes": 1024 * int(kilobytes)})


if server := getattr(PromptServer, "instance", None):  # not there in a test that has no server
    server.routes.post("/sim_device")(enable)
    server.routes.get("/sim_device")(tell)
    server.routes.get("/sim_device/ram")(tell_ram)


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
    "TestAfter": After,
    "TestSummary": Summary,
}
