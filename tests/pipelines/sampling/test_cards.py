"""One picture on several cards: that of one, for the same copies; plans of it; and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory.planning.forecast import Forecast, Operations, UnitForecast
from ballast.memory.shared_cards import divided, ram_share
from ballast.memory.simulated import supported
from ballast.pipelines.sampling.parallel import PROVED, check_cards
from hypothesis import given
from hypothesis import strategies as st
from places import SUPPORT

Folders = Callable[[str], Path]
SHORT = ("flux", "qwenimage", "wan")
WORK = UnitForecast(
    10, 20, 30, 4, Operations(600.0, 300.0), (("a", Operations(300.0)), ("b", Operations(300.0, 300.0)))
)


@pytest.mark.skipif(supported() is not None, reason=str(supported()))
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SHORT[:1], marks=pytest.mark.long),
        *(pytest.param(names, marks=pytest.mark.soak) for names in (SHORT[1:], ("flux2_klein",))),
    ],
)
def test_two_cards_make_the_picture_of_one(names: tuple[str, ...], tiny_folders: Folders, tmp_path: Path) -> None:
    """Streamed on each, by two processes: equal to one, all weights come to each, and no hook is left."""
    for name in names:
        (tmp_path / name).symlink_to(tiny_folders(name))
    command = [sys.executable, str(Path(__file__).parent / "card_ranks.py")]
    path = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    given = [[*command, str(rank), "2", str(tmp_path), *names] for rank in range(2)]
    each = [subprocess.Popen(own, stdout=-1, stderr=-1, env=path) for own in given]
    told = [process.communicate(timeout=200) for process in each]
    assert [process.returncode for process in each] == [0, 0], told[0][1].decode()[-2000:]
    first, second = (json.loads(out) for out, _ in told)
    for name in names:
        found = first[name]
        assert found["apart"] < 1e-5 < found["most"], name
        assert found["clean"], "no hook is left, and no byte"
        assert found["copied"] == pytest.approx(found["copied alone"], rel=0.01), "copies are not divided"
        assert found["copied"] > 2 * tiny.proportions(tmp_path / name)["transformer"], "they came in each step"
        assert found["peak"] < found["peak alone"], "what is computed is"
        assert second[name] == {key: pytest.approx(found[key], rel=0.05) for key in second[name]}
        assert second[name]["sum"] == found["sum"]


def test_what_is_proved_has_a_test() -> None:
    classes = {type(tiny.FAMILIES[name].build().transformer).__name__ for name in SHORT}
    classes.add(type(tiny.FAMILIES["flux2_klein"].build().transformer).__name__)
    assert set(PROVED) == classes


@pytest.mark.parametrize("cards", [1, 2, 3])
def test_computing_is_divided_and_nothing_else(cards: int) -> None:
    whole = Forecast(7, {"dit": WORK}, 5, (1, 2))
    share = divided(whole, cards)
    assert share.units["dit"].operations == Operations(600 / cards, 300 / cards)
    assert share.units["dit"].modules == (("a", Operations(300 / cards)), ("b", Operations(300 / cards, 300 / cards)))
    assert divided(share, 1) == share and share.to_dict().keys() == whole.to_dict().keys()
    again = {**share.units["dit"].__dict__, "operations": WORK.operations, "modules": WORK.modules}
    assert again == WORK.__dict__ and (share.idle_bytes, share.steps, share.result) == (7, 5, (1, 2))


SIZES = st.integers(0, 2**40)


@given(SIZES, SIZES, SIZES, st.integers(1, 8))
def test_copies_of_all_processes_fit_the_ram(budget: int, weights: int, least: int, processes: int) -> None:
    """With the one that the page cache has of what they lack, where there is room for that at all."""
    own = ram_share(budget, weights, least, processes)
    assert processes * own <= budget and own >= min(least, budget // processes)
    if budget >= processes * weights:
        assert own >= weights, "no process reads again"
    elif budget >= weights and own > least:
        assert processes * own + (weights - own) <= budget, "one copy of what is read again stays cached"
        assert processes * own + (weights - own) > budget - processes, "and nothing is left unused"
    elif budget < weights:
        assert own == budget // processes


def test_plan_of_several_cards(tiny_folders: Folders, sim: ModuleType) -> None:
    """Half the seconds where computing sets the pace, and as many where copies do; never less VRAM than promised."""
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="sim")
    run: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "vram": "1GB"}
    for strategy, gbps, tflops, ratio in (("resident", 1000, 0.001, 0.5), ("leafwise", 0.001, 1000, 1)):
        sim.enable(total="1GB", h2d_gbps=gbps, tflops=tflops)
        one, two = (pipe.plan(**run, strategy=strategy, cards=cards) for cards in (1, 2))
        assert two.step_seconds == pytest.approx(ratio * one.step_seconds, rel=0.02)
        assert two.peak_vram_bytes == one.peak_vram_bytes and "the best batch is 1" in two.batch_words()
    assert ", on 2 cards, " in two.headline() and "on 2 cards" not in one.headline()
    assert "Each card computes 1/2 of sampling, is brought all weights, and needs at most this VRAM." in str(two)


@pytest.mark.parametrize("name", ["sd3", "ltx", "lumina2"])
def test_classes_that_are_not_proved(name: str, tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders(name), device="cpu")
    with pytest.raises(ValueError, match="runs on one card only; FluxTransformer2DModel, .* Use 1 card."):
        pipe.check_cards(2)
    pipe.check_cards(1)


def test_what_cannot_be_shared(tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    cond = pipe.encode("a boat", "")
    units = {unit.name: unit.module for unit in pipe.denoisers}
    for cards, more, words in (
        (0, {}, "cards is 0"),
        (3, {}, "has 2 attention heads, which 3 cards cannot share"),
        (2, {"compile": True}, "compiled blocks run on one card only"),
        (2, {"attention": "flex"}, "attention 'flex' runs on one card only"),
    ):
        with pytest.raises(ValueError, match=words):
            check_cards(cards, units, **more)
    with pytest.raises(ValueError, match="cards is 2, and 1 process draws"):
        pipe.sample(cond, width=48, height=32, steps=1, cards=2)

    class Own(type(units["transformer"])):  # type: ignore[misc]
        """Such as Pyramid-Flow has."""

    with pytest.raises(ValueError, match="Own, runs on one card only"):
        check_cards(2, {"transformer": torch.nn.Module.__new__(Own)})
