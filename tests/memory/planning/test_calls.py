"""Calls that dry runs have seen: told again from a file they take and give the same, and those between two a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from ballast.memory.planning.dry_run import dry_run_known
from ballast.memory.planning.forecast import Forecast
from ballast.memory.planning.known_calls import KnownCalls
from ballast.memory.weights.unit import ManagedModel
from torch import nn

CHANNELS = 16


class Kept:
    """What is no tensor, and holds one, as a cache of keys does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Encoder(nn.Module):
    """Attention with a whole score matrix: its peak grows with the square of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, CHANNELS)
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.words(ids)
        states = [x]
        for layer in self.layers:
            scores = (x @ x.transpose(1, 2)).softmax(-1)
            if mask is not None and not mask.all():
                scores = scores * mask[:, None, :]
            x = layer(scores @ x)
            states.append(x)
        counts = torch.ones_like(ids)  # as of words that registers take the place of
        made = {"last": x, "states": states, "part": x[:, 1:], "cache": Kept(x.repeat(1, 2, 1)), "name": "x"}
        return made | {"counts": counts[:, :, None].squeeze(-1), "ids": ids.cumsum(1)}


def unit() -> ManagedModel:
    return ManagedModel("encoder", "text_encoder", lambda: Encoder().to("meta"))


def forecast(known: KnownCalls, *counts: int, zeros: int = 0) -> tuple[Forecast, list[Any]]:
    """A stage that encodes texts of so many tokens one by one and holds on to what it is given."""
    given: list[Any] = []

    def run(device: torch.device, modules: Any) -> None:
        for count in counts:
            ids = torch.ones(1, count, dtype=torch.long, device=device)
            mask = (torch.arange(count, device=device) < count - zeros).long()[None]
            given.append(modules["encoder"](ids, mask))

    found, _ = dry_run_known([unit()], {"encoder": known}, run)
    return found, given


def from_file(known: KnownCalls) -> KnownCalls:
    return KnownCalls.from_dict(json.loads(json.dumps(known.to_dict())))


def test_known_calls_take_and_give_the_same() -> None:
    known = KnownCalls()
    seen, _ = forecast(known, 24, 24, 40)
    assert len(known) == 2
    told, given = forecast(from_file(known), 24, 24, 40)
    assert told == seen
    assert [result["part"].shape for result in given] == [(1, 23, CHANNELS), (1, 23, CHANNELS), (1, 39, CHANNELS)]
    assert all(result["name"] == "x" and len(result["states"]) == 4 for result in given)
    assert all(result["counts"].tolist() == [[1] * result["last"].shape[1]] for result in given)
    with pytest.raises(RuntimeError, match="has none"):
        given[0]["ids"].tolist()
    assert given[0]["last"].untyped_storage()._cdata == given[0]["part"].untyped_storage()._cdata, "counted once"
    work = seen.units["encoder"]
    row = CHANNELS * 4
    # Four states and a cache of two for each text before the last, whose scores are two squares at their most.
    assert work.live_bytes == 2 * 24 * 8
    assert work.working_bytes >= 2 * 24 * 6 * row + 40 * 40 * 4
    assert work.calls == 3 and len(work.modules) == 4


def test_whether_all_of_a_mask_counts_is_told_apart() -> None:
    known = KnownCalls()
    forecast(known, 24)
    forecast(known, 24, zeros=3)
    assert len(known) == 2
    forecast(known, 24, zeros=5)
    assert len(known) == 2


@pytest.mark.parametrize("zeros", [0, 2])
def test_calls_between_two_known_ones_are_bounded_by_them(zeros: int) -> None:
    known = KnownCalls()
    for count in (10, 70):
        forecast(known, count, zeros=zeros)
    for count in (11, 23, 40, 69):
        exact, given = forecast(KnownCalls(), count, zeros=zeros)
        told, again = forecast(known, count, zeros=zeros)
        one, other = exact.units["encoder"], told.units["encoder"]
        assert one.working_bytes <= other.working_bytes <= one.working_bytes + 4 * 4 * 30 * 30
        assert one.live_bytes == other.live_bytes
        assert [t.shape for t in given[0]["states"]] == [t.shape for t in again[0]["states"]]
        assert given[0]["part"].stride() == again[0]["part"].stride()
        assert given[0]["counts"].tolist() == again[0]["counts"].tolist() == [[1] * count]
    assert len(known) == 2
    forecast(known, 71, zeros=zeros)
    assert len(known) == 3, "none beyond it is known"


@pytest.mark.parametrize(
    "damage",
    [
        lambda call: call.update(peak_bytes=-1),
        lambda call: call.update(modules=["x"]),
        lambda call: call.pop("left_bytes"),
        lambda call: call["given"].update(structure="[1, {}]"),
        lambda call: call["given"].update(storages=[1, 1, 1, 1, 1]),
        lambda call: call["given"]["leaves"].pop(),
        lambda call: call["given"]["leaves"][0].update(dtype="nn"),
        lambda call: call["given"]["leaves"][0].update(storage=9),
        lambda call: call["given"]["leaves"][0].pop("value"),
    ],
)
def test_damaged_calls_are_errors(damage: Any) -> None:
    known = KnownCalls()
    forecast(known, 24)
    data = json.loads(json.dumps(known.to_dict()))
    (seen,) = data.values()
    damage(seen["24"])
    with pytest.raises((KeyError, TypeError, ValueError)):
        KnownCalls.from_dict(data)
