"""Every stage keeps the stated budget, takes what is planned and sits as planned; what cannot fit is refused.

BALLAST_SOAK=1 takes all families with 20 budgets each, and longer walks.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import hidream_folders
import newbie_folders
import pyramid_folders
import pytest
import tiny
from ballast.memory import DoesNotFitError, manager
from ballast.memory.planning import dry_run
from ballast.memory.sizes import parse_bytes
from ballast.pipelines.planning import forecast_cache
from ballast.pipelines.planning.vae_forecasts import VaeForecasts
from ballast.pipelines.stages.vae_stages import vae_run
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from selection import few

Folders = Callable[[str], Path]

SOAK = bool(os.environ.get("BALLAST_SOAK"))
OURS = ("hidream_dev", "newbie", "pyramid")
FAMILIES = [*tiny.FAMILIES, *OURS] if SOAK else ["flux", "lumina2", *OURS]
BUDGETS = 20 if SOAK else 3
STRATEGIES = ("auto", "resident", "streamed", "leafwise")
SENTENCE = "a red boat lies on the wet sand of the bay, ropes over its side, gulls above the mast"
numbers = itertools.count()


class Opened:
    """An open pipeline of a family on the simulated card, and short runs of its stages."""

    def __init__(self, name: str, folders: Folders, root: Path) -> None:
        family = tiny.FAMILIES.get("hidream" if name == "hidream_dev" else name)
        if name == "hidream_dev":
            folder = hidream_folders.complete(folders("hidream"), root / name, "dev")
        elif name == "newbie":
            folder = newbie_folders.official(root / name)
        elif name == "pyramid":
            folder = pyramid_folders.save("mmdit", root / name)
        else:
            folder = folders(name)
        self.name, self.draw = name, random.Random(name)
        self.pipe = ballast.open_pipeline(folder, device="sim", cache_dir=root / "cache")
        self.negative, self.options = True, {}
        self.size: dict[str, Any] = {"width": 64, "height": 64, "steps": 2}
        self.decoding: dict[str, Any] = {}
        if family:
            self.negative, self.options = family.negative, family.encode_kwargs
            self.size |= {"width": family.size[0], "height": family.size[1], "frames": family.frames}
            self.size |= {"guidance": family.guidance, **family.call_kwargs}
        elif name == "pyramid":
            self.size |= {"frames": 9, "guidance": 2.0}
        if name == "ltx_timestep":
            self.decoding = {"temb": [family.call_kwargs["decode_timestep"]]} if family else {}

    def encoding(self, words: int, others: int = 2) -> Callable[[], Any]:
        """Encodes a prompt that was not encoded before."""
        prompt, negative = (" ".join(self.draw.choices(SENTENCE.split(), k=count)) for count in (words, others))
        prompt += f" {next(numbers)}"
        return partial(self.pipe.encode, prompt, negative if self.negative else "", **self.options)

    def sample(self, cond: Any, strategy: str = "auto") -> Any:
        return self.pipe.sample(cond, **self.size, strategy=strategy)

    def above(self, stage: str) -> float:
        """How far a plan may be above what is measured. HiDream's is for any routing among its experts."""
        return 1.07 if self.name.startswith("hidream") and stage == "sample" else 1.05


def keeps(opened: Opened, stage: str, run: Callable[[], Any], budget: int, sim: ModuleType) -> Any:
    """Run a stage in a budget or, if that is refused, in the least that does. Returns the result."""
    pipe, refused = opened.pipe, ""
    pipe.runner = pipe.runner.set(vram_bytes=budget)
    sim.reset_stats()
    others = sim.stats().allocated_bytes
    try:
        result = run()
    except DoesNotFitError as error:
        refused = str(error)
        assert sim.stats().allocated_bytes <= others
        pipe.runner = pipe.runner.set(vram_bytes=least_named(refused))
        assert pipe.vram_bytes > budget
        sim.reset_stats()
        result = run()
    record = manager("sim").timeline.stages[-1]
    # What is kept of an earlier stage may exceed a budget that was made smaller meanwhile, until this one begins.
    peak, planned = record.peak_bytes if others else sim.stats().peak_bytes, record.planned
    told = (opened.name, stage, budget, pipe.vram_bytes, peak, refused)
    assert record.name == stage, told
    assert peak <= pipe.vram_bytes, told
    if planned is None:
        assert others, told
    else:
        assert peak <= planned.peak_vram_bytes <= opened.above(stage) * peak, (*told, planned.peak_vram_bytes)
        ran = {unit.name: unit.placement for unit in record.units.values() if unit.placement != "-"}
        assert {unit.unit: unit.placement for unit in planned.units} == ran, told
    assert pipe.keep or sim.stats().allocated_bytes == 0
    return result


def least_named(refused: str) -> int:
    """The budget that a refusal names as the least."""
    assert "\n" not in refused
    (least,) = re.findall(r"Raise the vram budget to ([\d.]+ \w+)", refused)
    return parse_bytes(least)


def between(least: int, most: int, seed: str) -> list[int]:
    """Random budgets around and between two."""
    draw = random.Random(seed)
    return [least, most, *(draw.randint(int(0.8 * least), int(1.1 * most)) for _ in range(BUDGETS - 2))]


def span(opened: Opened, run: Callable[[], Any]) -> tuple[int, int]:
    """The least that a stage runs in, and what it takes whole."""
    opened.pipe.runner = opened.pipe.runner.set(vram_bytes=1)
    with pytest.raises(DoesNotFitError) as refused:
        run()
    opened.pipe.runner = opened.pipe.runner.set(vram_bytes=None)
    run()
    planned = manager("sim").timeline.stages[-1].planned
    assert planned is not None
    return least_named(str(refused.value)), planned.peak_vram_bytes


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_keep_random_budgets(name: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    opened = Opened(name, tiny_folders, tmp_path)
    for budget in between(*span(opened, opened.encoding(6)), f"{name} encode"):
        run = opened.encoding(opened.draw.randint(1, 12), opened.draw.randint(0, 6))
        cond = keeps(opened, "encode", run, budget, sim)
    for strategy in STRATEGIES:
        run = partial(opened.sample, cond, strategy)
        least, most = span(opened, run)
        for budget in between(least, max(least, most), f"{name} {strategy}"):
            latents = keeps(opened, "sample", run, budget, sim)
    decodes_whole(opened, latents, sim)


def decodes_whole(opened: Opened, latents: Any, sim: ModuleType) -> None:
    """Decoding takes what is planned where that fits; `test_decode_budgets` has the other ways."""
    import torch

    pipe = opened.pipe
    arguments = {name: torch.tensor(value) for name, value in opened.decoding.items()}
    pipe.runner = pipe.runner.set(
        vram_bytes=vae_run(pipe.model, pipe.runner, "decode", arguments, 2**40).start(latents)[0].peak_bytes
    )
    way, _ = vae_run(pipe.model, pipe.runner, "decode", arguments, pipe.vram_bytes).start(latents)
    sim.reset_stats()
    pipe.decode(latents, **arguments)
    assert sim.stats().peak_bytes <= pipe.vram_bytes
    # Pyramid-Flow decodes in chunks as long as the budget lets them be.
    assert (way.name == "whole" and way.peak_bytes <= 1.05 * sim.stats().peak_bytes) or opened.name == "pyramid"


@pytest.mark.long
@pytest.mark.parametrize("name", ["flux", "newbie"])
def test_plans_of_runs_choose_what_runs(
    name: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` places the encoders as `encode` does, before and after it has run."""
    monkeypatch.setattr(VaeForecasts, "stripes", lambda *_: None)
    opened = Opened(name, tiny_folders, tmp_path)
    opened.options, pipe, prompt = {}, opened.pipe, "a red boat"
    least, most = span(opened, partial(pipe.encode, f"{prompt} -"))
    for part in range(5) if SOAK else (0, 1, 3):
        pipe.runner = pipe.runner.set(vram_bytes=least + part * (most - least) // 4)
        before = pipe.plan(**opened.size, prompt=f"{prompt} {part}").stages[0]
        pipe.encode(f"{prompt} {part}")
        after = pipe.plan(**opened.size, prompt=f"{prompt} {part}").stages[0]
        record = manager("sim").timeline.stages[-1]
        assert before == after
        assert record.planned and record.planned.units == before.units
        assert {unit.unit: unit.placement for unit in before.units} == {
            unit.name: unit.placement for unit in record.units.values()
        }


def test_new_prompts_run_no_encoder_on_shapes(
    tiny_folders: Folders, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a new process. Of texts that are not padded, those between two known lengths are told by these."""
    made: list[str] = []
    build = dry_run._Structure.__init__

    def counted(self: Any, module: Any, *more: Any) -> None:
        made.append(type(module).__name__)
        build(self, module, *more)

    monkeypatch.setattr(dry_run._Structure, "__init__", counted)
    monkeypatch.setattr(forecast_cache, "_ram", OrderedDict())
    padded, unpadded = Opened("flux", tiny_folders, tmp_path), Opened("qwenimage", tiny_folders, tmp_path)
    padded.pipe.encode("a boat", "x", **padded.options)
    assert sorted(made) == ["CLIPTextModel", "T5EncoderModel"]
    forecast_cache._ram.clear()
    padded.pipe.encode("two grey boats on the sand", "", **padded.options)
    assert len(made) == 2
    made.clear()
    for prompt in ("a" * 8, "b" * 60):
        unpadded.pipe.encode(prompt, prompt, **unpadded.options)
    assert len(made) == 2
    forecast_cache._ram.clear()
    for count in (9, 21, 33, 59, 60):
        unpadded.pipe.encode("c" * count, "d" * (68 - count), **unpadded.options)
        planned = manager("sim").timeline.stages[-1].planned
        peak = manager("sim").timeline.stages[-1].peak_bytes
        assert planned and peak <= planned.peak_vram_bytes <= 1.05 * peak
    assert len(made) == 2


@pytest.mark.parametrize("strategy", few(["resident", "streamed", "leafwise"], "leafwise"))
def test_tables_of_a_kept_transformer_count(
    strategy: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """Qwen-Image keeps tables of positions on the device, larger here than its weights."""
    opened = Opened("qwenimage", tiny_folders, tmp_path)
    opened.pipe.runner = opened.pipe.runner.set(keep=True)
    cond = opened.encoding(4)()
    least, most = span(opened, opened.encoding(4))
    for budget in (int(1.05 * least), int(1.05 * most), 2 * most):
        opened.pipe.runner = opened.pipe.runner.set(vram_bytes=None)
        opened.sample(cond, strategy)
        keeps(opened, "encode", opened.encoding(4), budget, sim)
    manager("sim").free()


@pytest.mark.parametrize("words", few([(6, 2), (6, 6), (3, 3)], (6, 2)))
def test_tables_of_others_are_no_part_of_what_a_stage_has_brought(
    words: tuple[int, int], tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """Z-Image's transformer keeps its tables while the encoder runs with hardly more than it needs alone."""
    opened = Opened("zimage", tiny_folders, tmp_path)
    _, most = span(opened, opened.encoding(6))
    cond = opened.encoding(3, 3)()
    opened.pipe.runner = opened.pipe.runner.set(keep=True, vram_bytes=None)
    opened.sample(cond, "leafwise")
    keeps(opened, "encode", opened.encoding(*words), most, sim)
    manager("sim").free()


def test_tables_that_leave_with_their_transformer_count_again(
    tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """Kept whole, it must stream in a smaller budget: its tables come anew, beside what the loop holds meanwhile."""
    opened = Opened("qwenimage", tiny_folders, tmp_path)
    cond = opened.encoding(4)()
    least, most = span(opened, partial(opened.sample, cond))
    opened.pipe.runner = opened.pipe.runner.set(keep=True)
    for share in (0.2, 0.25, 0.3):
        keeps(opened, "sample", partial(opened.sample, cond), most, sim)
        keeps(opened, "sample", partial(opened.sample, cond), int(least + share * (most - least)), sim)
    manager("sim").free()


class Budgets(RuleBasedStateMachine):
    """One open pipeline whose budget, prompts, strategy and memory of earlier runs change between runs."""

    opened: Opened
    sim: ModuleType
    spans: tuple[tuple[int, int], tuple[int, int]]

    def __init__(self) -> None:
        super().__init__()
        self.cond: Any = None
        self.share = 1.0
        self.opened.pipe.runner = self.opened.pipe.runner.set(keep=False)

    def budget(self, stage: int) -> int:
        least, most = self.spans[stage]
        return int(least + self.share * (most - least))

    @rule(share=st.floats(-0.1, 1.1))
    def change_budget(self, share: float) -> None:
        self.share = share

    @rule(keep=st.booleans())
    def keep_or_not(self, keep: bool) -> None:
        self.opened.pipe.runner = self.opened.pipe.runner.set(keep=keep)
        if not keep:
            manager("sim").free()

    @rule(words=st.integers(1, 14), others=st.integers(0, 6))
    def encode(self, words: int, others: int) -> None:
        """Beside the transformer, where that is kept."""
        self.cond = keeps(self.opened, "encode", self.opened.encoding(words, others), self.budget(0), self.sim)

    @precondition(lambda self: self.cond is not None)
    @rule(strategy=st.sampled_from(STRATEGIES))
    def sample(self, strategy: str) -> None:
        keeps(self.opened, "sample", partial(self.opened.sample, self.cond, strategy), self.budget(1), self.sim)

    def teardown(self) -> None:
        manager("sim").free()


@pytest.mark.parametrize("name", FAMILIES if SOAK else ["qwenimage"])
def test_budgets_and_prompts_may_change_between_runs(
    name: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    opened = Opened(name, tiny_folders, tmp_path)
    encoding = span(opened, opened.encoding(6))
    cond = opened.encoding(6)()
    machine = type("Machine", (Budgets,), {"opened": opened, "sim": sim})
    machine.spans = (encoding, span(opened, lambda: opened.sample(cond)))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20 if SOAK else 5,
            stateful_step_count=12,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],  # a failure says all that there is to say
            suppress_health_check=list(HealthCheck),
        ),
    )
