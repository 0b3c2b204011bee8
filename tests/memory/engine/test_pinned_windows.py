"""A device that pins only what torch allocates for it, as XPU does: weights reach it through windows of such memory."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.simulated import lazy
from ballast.memory.weights import hostbuffer
from ballast.memory.weights.hostbuffer import bytes_of
from ballast.memory.weights.stored import stored_tensors
from safetensors.torch import save_file
from streamed_models import SIM, Blocks, budget, noise, put, run

STEPS = 3


def enable(sim: ModuleType, copies: lazy.Mode) -> None:
    sim.enable(total="1GB", tflops=1e-3, h2d_gbps=0.05, copies=copies)


def refused(*_: object) -> torch.Tensor:
    raise RuntimeError("out of pinned memory")


@pytest.mark.parametrize("on_disk", [False, True])
def test_copies_come_from_windows_and_block_nobody(
    on_disk: bool, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch refuses the windows, torch takes pinned memory for each copy."""
    plain, stored, pinned = Blocks(), dict[str, Any](), list[bool]()
    if on_disk:
        save_file({k: v.contiguous() for k, v in plain.state_dict().items()}, tmp_path / "a.safetensors")
        stored = dict(stored_tensors([tmp_path / "a.safetensors"]))
    copy = lazy.Copies.copy

    def noted(self: lazy.Copies, target: Any, source: Any, to_device: bool, *others: Any) -> bool:
        waits = copy(self, target, source, to_device, *others)
        if to_device:
            assert not waits
            pinned.append(source.is_pinned())
        return waits

    def calls() -> tuple[torch.Tensor, set[bool]]:
        """The result of calls that follow the first, and whether their copies are of pinned memory."""
        module = Blocks().to("meta") if on_disk else Blocks()
        placement, x = put(module, budget(plain, 0.3), source=stored or None), noise(64)
        run(module, x)
        torch.get_device_module("sim").synchronize()
        with monkeypatch.context() as patch:
            pinned.clear()
            patch.setattr(lazy.Copies, "copy", noted)
            for _ in range(STEPS):
                result = run(module, x)
            torch.get_device_module("sim").synchronize()
            found = set(pinned)
        placement.remove()
        assert sim.stats().hazards == 0
        return result.cpu(), found

    enable(sim, "eager")
    expected, _ = calls()
    enable(sim, "xpu")
    found, were_pinned = calls()
    assert torch.equal(found, expected) and were_pinned == {True}
    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    found, were_pinned = calls()
    assert torch.equal(found, expected) and were_pinned == {False}


@pytest.mark.parametrize(("kind", "by_torch"), [("xpu", True), ("cuda", False), ("mps", False), ("cpu", False)])
def test_which_devices_pin_by_torch(kind: str, by_torch: bool) -> None:
    device = torch.device(kind)
    assert hostbuffer.pins_by_torch(device) == by_torch
    assert hostbuffer.wants_pinned(device) == (kind in ("xpu", "cuda"))


def test_window_is_torchs_and_can_be_read_into(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(SIM)
    enable(sim, "xpu")
    window, pages = hostbuffer.window(1000, device), hostbuffer.allocate(1000)
    assert (window.nbytes, window.dtype, window.is_inference()) == (1000, torch.uint8, False)
    bytes_of(window)[3:5] = b"\x07\x08"
    assert window[2:6].tolist()[1:3] == [7, 8] and len(bytes_of(window)) == 1000
    assert hostbuffer.pin(window, device) and not hostbuffer.pin(pages, device)
    hostbuffer.unpin(window)  # it stays as it is
    monkeypatch.setattr(hostbuffer, "_left_paged", {device})
    assert not hostbuffer.window(1000, device).is_pinned() and not hostbuffer.pin(window, device)
    enable(sim, "eager")
    assert not hostbuffer.window(1000, device).is_pinned()
