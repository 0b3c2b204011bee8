"""Ways to run a model that does not fit: each makes a transformer on the CPU ready to be called on the device.

Packages are imported where they are used. What is missing or refuses the device raises; the caller lists it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..memory.engine.engine import Engine
from ..memory.weights.structure import block_lists
from .stream import Regime, place, streamed


@dataclass
class Job:
    """The job of a rival. `share` is how much of the weights there shall be room for, 0 to 1.

    `budget_bytes` is what Ballast gets for the weights.
    """

    module: nn.Module
    device: torch.device
    share: float
    budget_bytes: int
    work_bytes: int  # that a resident step takes beside the weights
    size: str  # of the models that are measured
    regime: Regime

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """All blocks with their names, in the order of the module."""
        return [(f"{path}.{i}", block) for path, members in block_lists(self.module) for i, block in enumerate(members)]

    def largest(self) -> tuple[str, nn.ModuleList]:
        """Return the list of blocks with most weights, and its name."""
        return max(block_lists(self.module), key=lambda found: sum(p.nbytes for p in found[1].parameters()))

    def move_rest(self) -> None:
        """Move all weights outside the blocks to the device, for rivals that handle blocks only."""
        kept = {id(tensor) for _, block in self.blocks() for tensor in (*block.parameters(), *block.buffers())}
        for owner in self.module.modules():
            # Put anew, not by `data`, which the simulated device cannot change.
            for key, weight in list(owner._parameters.items()):
                if weight is not None and id(weight) not in kept:
                    owner._parameters[key] = nn.Parameter(weight.to(self.device), requires_grad=False)
            for key, buffer in list(owner._buffers.items()):
                if buffer is not None and id(buffer) not in kept:
                    owner._buffers[key] = buffer.to(self.device)


def _resident(job: Job) -> Any:
    place(Engine(job.module, job.device))
    return job.module


def _ballast(job: Job) -> Any:
    placement, _ = streamed(job.module, job.size, job.regime, job.device, job.budget_bytes)
    place(placement)
    return job.module


def _naive(job: Job) -> Any:
    def fetch(block: nn.Module, args: Any) -> None:
        block.to(job.device)

    def drop(block: nn.Module, args: Any, result: Any) -> None:
        block.to("cpu")

    job.move_rest()
    for _, block in job.blocks():
        block.register_forward_pre_hook(fetch)
        block.register_forward_hook(drop)
    return job.module


def _accelerate(job: Job) -> Any:
    from accelerate import cpu_offload

    # By their index for CUDA, as its documentation does; for a device that it does not know, by its name.
    device = job.device.index if job.device.type == "cuda" else job.device
    cpu_offload(job.module, execution_device=device, offload_buffers=True)
    return job.module


def _diffusers(job: Job, **how: Any) -> Any:
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    apply_group_offloading(
        job.module, onload_device=job.device, offload_device=cpu, use_stream=True, record_stream=True, **how
    )
    return job.module


def _diffusers_block(job: Job) -> Any:
    return _diffusers(job, offload_type="block_level", num_blocks_per_group=1)


def _diffusers_leaf(job: Job) -> Any:
    return _diffusers(job, offload_type="leaf_level")


def _mmgp(job: Job) -> Any:
    from mmgp import offload, profile_type

    limit = max(1, job.budget_bytes >> 20)
    profile = profile_type.HighRAM_LowVRAM
    offload.profile({"transformer": job.module}, profile, quantizeTransformer=False, budgets={"transformer": limit})
    return job.module


def _cache_dit(job: Job) -> Any:
    from cache_dit.offload import layerwise_cpu_offload

    names = [name for name, _ in job.blocks()]
    kept = round(job.share * len(names))
    job.move_rest()
    layerwise_cpu_offload(
        job.module, module_names=names, onload_device=job.device, async_transfer=True, transfer_buckets=2,
        prefetch_limit=True, persistent_buckets=kept, persistent_bins=max(1, kept),
    )  # fmt: skip
    return job.module


def _diffusers_mm(job: Job) -> Any:
    from diffusers_mm import ModelManager

    # Its default pins each weight anew in each step.
    manager = ModelManager(strategy="block_pin", group_offload_low_cpu_mem=False)
    manager.register_component("transformer", job.module)
    manager.set_block_pin_count("transformer", round(job.share * len(job.largest()[1])))
    manager.apply_offload_strategy(job.device)
    vars(job.module)["bench_manager"] = manager  # for as long as the module lives
    return job.module


def _flextensor(job: Job) -> Any:
    import flextensor

    total = torch.get_device_module(job.device).mem_get_info(job.device)[1]
    config = flextensor.OffloadConfig(
        include_patterns=[f"{path}.*" for path, _ in block_lists(job.module)], gpu_device=job.device.index or 0,
        max_gpu_mem_fraction=min(1.0, (job.budget_bytes + job.work_bytes) / total), num_blocks=4, min_blocks=2,
        discovery_iters=1, profiling_iters=10,
    )  # fmt: skip
    return flextensor.offload(job.module, config=config)


def _dynamic_offloader(job: Job) -> Any:
    from diffusers_dynamic_offloader import enable_offload

    # By default it takes what is free.
    enable_offload(
        job.module, preset="one_shot_fast", component="transformer", route="dynamic_offload",
        execution_device=job.device, auto_budget_policy="off",
        resident_module_budget_gb=job.share * sum(p.nbytes for p in job.module.parameters()) / 2**30,
    )  # fmt: skip
    return job.module


@dataclass(frozen=True)
class Rival:
    """A way to offload. `budgeted`: it can be told how much to keep resident."""

    prepare: Callable[[Job], Any]
    budgeted: bool = False
    package: str | None = None
    warm_up: int = 2  # steps before the steady ones


RIVALS = {
    "resident": Rival(_resident),
    "ballast": Rival(_ballast, True),
    "naive": Rival(_naive),
    "accelerate": Rival(_accelerate, package="accelerate"),
    "diffusers-block": Rival(_diffusers_block, package="diffusers"),
    "diffusers-leaf": Rival(_diffusers_leaf, package="diffusers"),
    "mmgp": Rival(_mmgp, True, "mmgp"),
    "cache-dit": Rival(_cache_dit, True, "cache-dit"),
    "diffusers-mm": Rival(_diffusers_mm, True, "diffusers-mm"),
    "flextensor": Rival(_flextensor, True, "flextensor", 14),
    "dynamic-offloader": Rival(_dynamic_offloader, True, "diffusers-dynamic-offloader"),
}
