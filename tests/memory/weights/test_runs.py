"""A weight that lies in several runs of its file: read to RAM, and streamed from disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ballast.memory import ManagedModel
from ballast.memory.weights.stored import Stored, stored_tensors
from safetensors.torch import save_file
from streamed_models import SIM, Blocks, noise, put, run

ROWS, COLUMNS = 64, 64


def swapped(at: Stored) -> Stored:
    """The halves of a tensor, the second first."""
    half = ROWS // 2 * COLUMNS
    second = at.offset + half * at.dtype.itemsize
    return replace(at, offset=second, runs=((second, half), (at.offset, half)))


def unit(folder: Path, dtype: torch.dtype) -> tuple[ManagedModel, Blocks]:
    """Blocks whose first weight is stored with its halves swapped, in `dtype`, and the same in memory."""
    plain = Blocks(4)
    tensors = {name: tensor.to(dtype) for name, tensor in plain.state_dict().items()}
    plain.load_state_dict(tensors)
    first = "blocks.0.up.weight"
    tensors[first] = tensors[first].roll(ROWS // 2, 0).clone()
    save_file(tensors, folder / "model.safetensors")
    stored = stored_tensors([folder / "model.safetensors"])
    stored[first] = swapped(stored[first])

    def build() -> Blocks:
        return Blocks(4).to("meta")

    return ManagedModel("blocks", "transformer", build, build, stored=lambda: stored), plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_to_ram(dtype: torch.dtype, tmp_path: Path) -> None:
    managed, plain = unit(tmp_path, dtype)
    managed.load()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(managed.module.state_dict()[name], tensor), name


@pytest.mark.parametrize("weights_bytes", [0, 3 * ROWS * COLUMNS * 4])
def test_streamed_from_disk(weights_bytes: int, tmp_path: Path, sim: ModuleType) -> None:
    """Through the ring, and where it stays on the device."""
    managed, plain = unit(tmp_path, torch.float32)
    x = noise()
    expected = run(plain, x.cpu())
    placement = put(managed.module, weights_bytes, source=managed.source())
    assert torch.equal(run(managed.module, x.to(SIM)).cpu(), expected)
    placement.remove()
