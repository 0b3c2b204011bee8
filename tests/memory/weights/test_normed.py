"""Layers with torch's older weight norm make their weight of what is there when they run."""

from __future__ import annotations

import pytest
import torch
from ballast.memory.weights.normed import norm_in_forward
from torch import nn


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_weight_is_made_within_forward() -> None:
    plain, moved = (nn.Sequential(nn.utils.weight_norm(nn.Conv1d(2, 3, 3))) for _ in range(2))
    moved.load_state_dict(plain.state_dict())
    norm_in_forward(moved)
    before, layer = vars(moved[0])["weight"], moved[0]
    forward = layer.forward

    def late(given: torch.Tensor) -> torch.Tensor:
        layer.weight_g.data.mul_(2)  # what comes when the layer is called
        return forward(given)

    layer.forward = late  # type: ignore[method-assign]
    given = torch.rand(1, 2, 8)
    made = moved(given)
    plain[0].weight_g.data.mul_(2)
    assert torch.equal(made, plain(given))
    assert vars(layer)["weight"] is before, "nothing that it made stays"
