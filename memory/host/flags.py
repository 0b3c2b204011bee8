"""ComfyUI's command-line flags about memory, and their meaning for a unit."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..vocabulary import Role
from .headroom import has_dynamic_vram


@dataclass(frozen=True)
class HostFlags:
    """The flags that concern us; all are off outside ComfyUI. `--reserve-vram` and `--cpu` come through `management`.

    - `keeps_all` (`--highvram`, `--gpu-only`): units stay in VRAM while there is room, whole if they fit.
    - `keeps_none` (`--disable-smart-memory`): nothing stays when its node is done.
    - `least` (`--novram`): VRAM holds only what is running.
    - `encoders_on_cpu` (`--lowvram`, if the host has no dynamic VRAM) and `vae_on_cpu` (`--cpu-vae`).
    - `unpinned` (`--disable-pinned-memory`) and `blocking` (`--disable-async-offload`): how weights are copied.
    - `graphs`: the host may have captured CUDA graphs, which hold addresses of workspaces. Off with
      `--disable-cuda-graphs`.
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
        """Return the strategy for a unit of that role. A strategy that the user chose in the graph wins over flags."""
        if wanted != "auto":
            return wanted
        if (self.encoders_on_cpu and role == "text_encoder") or (self.vae_on_cpu and role == "vae"):
            return "cpu"
        if self.least and role != "vae":  # a VAE saves memory by decoding in stripes instead
            return "streamed"
        return wanted

    def keeps(self, wanted: bool) -> bool:
        """Return whether the units of a stage stay when it ends. `wanted` is the caller's wish."""
        return (wanted or self.keeps_all) and not self.keeps_none


def host_flags() -> HostFlags:
    """Return the flags of the ComfyUI in this process."""
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
    """Return whether the host has made a stream to capture graphs on. True if that cannot be seen."""
    return bool(getattr(sys.modules.get("comfy.model_prefetch"), "GRAPH_CAPTURE_STREAMS", True))
