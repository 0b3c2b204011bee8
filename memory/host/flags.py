"""ComfyUI's command-line flags about memory, and their meaning for a unit."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..vocabulary import Role
from .headroom import has_dynamic_vram


@dataclass(frozen=True)
class HostFlags:
    """The flags that concern us; all off outside ComfyUI. `--reserve-vram` and `--cpu` come through other functions.

    keeps_all (`--highvram`, `--gpu-only`): what is in VRAM stays there while there is room, and whole if it fits.
    keeps_none (`--disable-smart-memory`): nothing stays when its node is done.
    least (`--novram`): nothing but what runs is in VRAM.
    encoders_on_cpu (`--lowvram`, where the host has no dynamic VRAM), vae_on_cpu (`--cpu-vae`).
    unpinned (`--disable-pinned-memory`), blocking (`--disable-async-offload`): how weights are copied.
    graphs (unless `--disable-cuda-graphs`): it has captured CUDA graphs, which hold addresses of workspaces.
    """

    keeps_all: bool = False
    keeps_none: bool = False
    least: bool = False
    encoders_on_cpu: bool = False
    vae_on_cpu: bool = False
    unpinned: bool = False
    blocking: bool = False
    graphs: bool = False

    def strategy(self, wanted: str, role: Role) -> str:
        """Return the strategy for a unit of that role. What the user chose in the graph counts more than a flag."""
        if wanted != "auto":
            return wanted
        if (self.encoders_on_cpu and role == "text_encoder") or (self.vae_on_cpu and role == "vae"):
            return "cpu"
        if self.least and role != "vae":  # which decodes in stripes instead
            return "streamed"
        return wanted

    def keeps(self, wanted: bool) -> bool:
        """Return whether the units of a stage stay when it ends."""
        return (wanted or self.keeps_all) and not self.keeps_none


def host_flags() -> HostFlags:
    """Return the flags of the ComfyUI that this process is."""
    options = getattr(sys.modules.get("comfy.cli_args"), "args", None)

    def said(name: str) -> bool:
        return bool(getattr(options, name, False))

    return HostFlags(
        keeps_all=said("highvram") or said("gpu_only"),
        keeps_none=said("disable_smart_memory"),
        least=said("novram"),
        encoders_on_cpu=said("lowvram") and not has_dynamic_vram(),
        vae_on_cpu=said("cpu_vae"),
        unpinned=said("disable_pinned_memory"),
        blocking=said("disable_async_offload"),
        graphs=hasattr(options, "disable_cuda_graphs") and not said("disable_cuda_graphs") and _captured(),
    )


def _captured() -> bool:
    """Return whether the host has made a stream to capture graphs on; where that cannot be seen, it may have."""
    return bool(getattr(sys.modules.get("comfy.model_prefetch"), "GRAPH_CAPTURE_STREAMS", True))
