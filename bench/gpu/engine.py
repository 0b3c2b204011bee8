"""The engine against its bound: resident, and with room for a share of the weights; raw and encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...memory.engine.engine import Engine
from .. import models, stream
from ..encoded import encode
from ..stream import Regime
from . import section
from .section import Section

_ROW, _ENCODING = 0.6, 1.2  # seconds that they take about for each GB of weights


def main(argv: Sequence[str]) -> None:
    """Run as a process of its own."""
    section.run(argv, lambda to: _Engine(to).measure())


class _Engine:
    """Rows of one model: for each kind of weights, each ratio of computing to copying, and each share."""

    def __init__(self, to: Section) -> None:
        self.to, self.size, self.meter = to, to.request["size"], to.meter()
        self.module = models.build(self.size)
        self.steps = 2 if to.dry else 5
        self.truths: dict[int, torch.Tensor] = {}  # by the number of tokens
        self.gigabytes = models.weight_bytes(self.module) / 2**30

    def measure(self) -> None:
        to, meter, request = self.to, self.meter, self.to.request
        overhead = stream.python_overhead(meter.device, calls=20 if to.dry else 200)
        to.tell(
            size=self.size, weight_bytes=models.weight_bytes(self.module),
            overhead_us_per_group={meter.device.type: round(overhead * 1e6, 1)},
        )  # fmt: skip
        with torch.inference_mode():
            regimes = stream.regimes(meter, self.module, self.size, tuple(request["ratios"]))
        for weights in request["weights"]:
            done = to.attempt(f"encoding as {weights}", _ENCODING * self.gigabytes, self._encode, weights)
            for regime in regimes if done else ():
                self._rows(weights, regime)

    @torch.no_grad()
    def _encode(self, weights: str) -> bool:
        if weights != "auto":
            encode(self.module, weights)
        return True

    @torch.inference_mode()
    def _rows(self, weights: str, regime: Regime) -> None:
        to, seconds = self.to, _ROW * self.gigabytes
        name = f"{weights}, {regime.tokens} tokens"
        found = to.attempt(f"{name}, resident", seconds, self._resident, weights, regime)
        for share in to.request["shares"] if found else ():
            to.attempt(f"{name}, {share:.0%}", seconds, self._streamed, weights, found, share)

    def _resident(self, weights: str, regime: Regime) -> Regime:
        """Its row, and the regime with what a resident step of these weights takes, decoding included."""
        meter, module = self.meter, self.module
        idle_bytes, step = meter.used_bytes(), models.inputs(self.size, regime.tokens, meter.device)
        placement = Engine(module, meter.device)
        placement.place()
        try:
            meter.accelerator.take_peak_bytes()
            (first,) = meter.steps(lambda: module(**step), 1)
            seconds = meter.steady(lambda: module(**step), self.steps)
            peak_bytes = meter.accelerator.take_peak_bytes()
            truth = self.truths.setdefault(regime.tokens, module(**step)[0].cpu())
            with meter.driver_peak() as used:
                is_equal = torch.equal(module(**step)[0].cpu(), truth)
        finally:
            placement.remove()
            meter.accelerator.empty_cache()
        streamable = sum(group.packed_bytes for group in stream.sizes_in(module).groups)
        self.to.row(
            weights=weights, ratio=seconds * regime.bandwidth / streamable, share=None, tokens=regime.tokens,
            bandwidth=regime.bandwidth, compute=seconds, streamed_bytes=0, copied_bytes=0, first_step=first,
            step=seconds, predicted=seconds, bound=seconds, over_bound=1.0, peak_bytes=peak_bytes,
            driver_bytes=used.over(idle_bytes), is_equal=is_equal,
        )  # fmt: skip
        return dataclasses.replace(regime, compute=seconds)

    def _streamed(self, weights: str, regime: Regime, share: float) -> None:
        truth = self.truths[regime.tokens]
        row = stream.measure(self.meter, self.module, self.size, regime, share, truth, self.steps)
        self.to.row(weights=weights, **dataclasses.asdict(row))
