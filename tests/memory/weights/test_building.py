"""Building a module's structure, whoever first asks for it."""

from __future__ import annotations

import pytest
import torch
from ballast.memory.simulated.dry import dry_card
from ballast.memory.weights.unit import ManagedModel
from torch import nn


def build() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 4)


@pytest.mark.parametrize("ask", [lambda unit: unit.module, ManagedModel.skeleton])
def test_what_a_dry_run_asks_for_is_no_part_of_its_card(ask: object) -> None:
    """Else the weights could not be read into it later from where they lie in the files."""
    unit = ManagedModel("linear", "other", build, read=build)
    with torch.inference_mode(), dry_card() as card:
        module = ask(unit)  # type: ignore[operator]
        assert card.allocated_bytes() == 0
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert not any(parameter.is_inference() for parameter in module.parameters())


def test_an_error_in_building_comes_out() -> None:
    def broken() -> nn.Module:
        raise ValueError("its config says nothing")

    with pytest.raises(ValueError, match="its config says nothing"):
        _ = ManagedModel("broken", "other", broken).module
