"""Time and bytes on one device: by events on a GPU and on the simulated one's virtual clock, by the wall on the CPU."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..memory import ram, simulated
from ..memory.accelerator import Accelerator, resolve_device
from . import models

SIM_TFLOPS = 1e-3  # of the simulated card; its bandwidth follows from the ratio that is asked for
_PROBE_BYTES = 2**28
_TRIES = 6


@dataclass
class Used:
    """Bytes of a device that are taken, by whomever; None where nobody tells."""

    bytes: int | None

    def over(self, before: int | None) -> int | None:
        """Return how many more these are."""
        return None if self.bytes is None or before is None else self.bytes - before


class Meter:
    """Measures calls on a device without waiting for it in between: a wait would change what is measured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.accelerator = Accelerator(device)
        self.is_sim = device.type == simulated.DEVICE_TYPE
        self._backend = None if device.type == "cpu" else torch.get_device_module(device)

    def mark(self) -> Any:
        """Return the moment when what has been queued on the present stream is done."""
        if self._backend is None:
            return time.perf_counter()
        event = self._backend.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks, once the device has passed them."""
        return end - start if self._backend is None else start.elapsed_time(end) / 1000

    def steps(self, call: Callable[[], Any], count: int) -> list[float]:
        """Seconds of each of so many calls in a row. The device is waited for before and after all of them."""
        self.accelerator.synchronize()
        marks = [self.mark()]
        for _ in range(count):
            call()
            marks.append(self.mark())
        self.accelerator.synchronize()
        return [self.seconds(*pair) for pair in zip(marks, marks[1:], strict=False)]

    def steady(self, call: Callable[[], Any], steps: int = 5, settle: int = 2) -> float:
        """Median seconds of a call among many: the first of a row, which finds an idle device, do not count."""
        return statistics.median(self.steps(call, settle + steps)[settle:])

    def used_bytes(self) -> int | None:
        """Return what the driver says is taken of the device, by this process and all others; None on the CPU."""
        if self._backend is None or not hasattr(self._backend, "mem_get_info"):
            return None
        free, total = self._backend.mem_get_info(self.device)
        return total - free

    @contextmanager
    def driver_peak(self, every: float = 0.005) -> Iterator[Used]:
        """Yield the highest `used_bytes` meanwhile. Not for what is timed: to ask takes a lock of the driver."""
        used, done = Used(self.used_bytes()), threading.Event()

        def look() -> None:
            now = self.used_bytes()
            if now is not None and used.bytes is not None:
                used.bytes = max(used.bytes, now)

        def watch() -> None:
            while not done.wait(every):
                look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield used
        finally:
            self.accelerator.synchronize()
            done.set()
            thread.join()
            look()

    def bandwidth(self) -> float:
        """Bytes per second from pinned memory to the device."""
        source = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
        if self.device.type != "cpu":
            source = source.pin_memory()
        target = torch.empty_like(source, device=self.device)
        return _PROBE_BYTES / self.steady(lambda: target.copy_(source, non_blocking=True), 7)

    def copied_bytes(self, call: Callable[[], Any]) -> int | None:
        """Bytes that one call copies to the device, by whatever means; None where nothing counts them."""
        self.accelerator.synchronize()
        if self.is_sim:
            before = simulated.stats().h2d_bytes
            call()
            return simulated.stats().h2d_bytes - before
        if self.device.type != "cuda":
            return None
        from torch.profiler import ProfilerActivity, profile

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            try:
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    call()
                    self.accelerator.synchronize()
                profiler.export_chrome_trace(str(path))
                return traced_bytes(json.loads(path.read_text("utf-8")))
            except Exception:  # a driver that does not let itself be traced: the figure is missing then
                return None


def traced_bytes(trace: dict[str, Any]) -> int:
    """Bytes copied from the host to the device, in a trace of torch's profiler."""
    copies = (event for event in trace["traceEvents"] if event.get("cat") == "gpu_memcpy")
    return sum(event["args"]["bytes"] for event in copies if "HtoD" in event["name"])


def find_device(word: str) -> torch.device:
    """Return the device that the user means; "auto" is a GPU where there is one, else the simulated card.

    The simulated one has no limit of memory and computes at `SIM_TFLOPS`.
    """
    if word == "auto" and resolve_device().type == "cpu":
        word = simulated.DEVICE_TYPE
    if word == simulated.DEVICE_TYPE:
        set_sim_bandwidth(25e9)
    return resolve_device(word)


def set_sim_bandwidth(bytes_per_second: float) -> None:
    """Give the simulated card another bandwidth; its counters start anew."""
    simulated.enable(total="1TB", tflops=SIM_TFLOPS, h2d_gbps=bytes_per_second / 1e9)


def find_tokens(meter: Meter, module: nn.Module, size: str, goal_seconds: float) -> tuple[int, float]:
    """Return how many image tokens a resident step of about so many seconds has, and how long that really takes."""
    tokens, found = models.SIZES[size].tokens, (0, 0.0)
    for _ in range(_TRIES):
        try:
            step = models.inputs(size, tokens, meter.device)
            seconds = meter.steady(lambda step=step: module(**step), 3)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            if found[0]:
                break
            meter.accelerator.empty_cache()
            tokens = max(1, tokens // 4)
            continue
        if not found[0] or abs(seconds - goal_seconds) < abs(found[1] - goal_seconds):
            found = tokens, seconds
        if abs(seconds / goal_seconds - 1) < 0.1 or tokens == 1 and seconds > goal_seconds:
            break
        tokens = max(1, round(tokens * min(8.0, max(0.125, goal_seconds / seconds))))
    if not found[0]:
        raise RuntimeError(f"a resident step of {size} does not fit on {meter.device}. Use a smaller --size.")
    return found


def environment(meter: Meter, size: str) -> dict[str, Any]:
    """Return what the figures were measured on, without the machine's own name."""
    import diffusers

    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {ram.total_bytes() / 2**30:.0f} GB RAM"
    return {
        "machine": "sim" if meter.is_sim else machine,
        "device": "sim" if meter.is_sim else meter.accelerator.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "diffusers": diffusers.__version__,
        "size": size,
    }
