"""`guidance_range`: equal to a stock loop without the negative pass, and counted alike by runs and plans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory.rates import ASSUMED
from ballast.pipelines.planning.sampling_forecasts import Sampling
from selection import few
from unguided import given_to, guided_in, text_of

Folders = Callable[[str], Path]
STEPS, RANGE = 5, (0.2, 0.6)  # the fourth of five begins at 0.6, which is outside
ROWS = {  # predictions of a call, with guidance
    "flux": 1, "qwenimage": 1, "wan": 1, "sd3": 2, "ltx": 2, "auraflow": 2, "chroma": 1, "cogvideox": 2,
    "flux2_klein": 1, "hunyuan_video": 1, "lumina2": 1, "mochi": 2, "sana": 2, "zimage": 2,
}  # fmt: skip
SCALE = 3.5
OFF = {"zimage": 0.0}  # others: 1


def scale_of(family: str) -> dict[str, float]:
    own = tiny.FAMILIES[family].guidance
    return {"true_cfg": SCALE, "guidance": own} if tiny.FAMILIES[family].distilled else {"guidance": SCALE}


def stock(family: str, folder: Path) -> torch.Tensor:
    """The latents of the unmodified class, guided in part of the steps."""

    def run(listen: Callable[[Any], None], is_guided: bool) -> torch.Tensor:
        scale = SCALE if is_guided else OFF.get(family, 1.0)
        given = {"true_cfg_scale" if tiny.FAMILIES[family].distilled else "guidance": scale}
        return tiny.stock(folder, steps=STEPS, listen=listen, **given)[0].float()

    return guided_in(run, RANGE)


@pytest.fixture
def opened(tiny_folders: Folders) -> Callable[..., Any]:
    """A family on the CPU, and its `sample`."""

    def open_family(name: str) -> tuple[Any, Callable[..., torch.Tensor]]:
        family = tiny.FAMILIES[name]
        pipe, encode, _, _ = tiny.stages(name, tiny_folders(name), "cpu")
        width, height = family.size
        run = {"width": width, "height": height, "frames": family.frames, "steps": STEPS, "seed": 0}
        return pipe, functools.partial(pipe.sample, encode(), **run, **family.call_kwargs)

    return open_family


def counted(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of the transformer from now on."""
    cls, rows = pipe.model.components["transformer"].cls, list[int]()
    forward = cls.forward

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(text_of(given_to(self, args, kwargs))))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", call)
    return rows


@pytest.mark.parametrize("name", few(ROWS, "flux", "wan", "zimage"))
def test_steps_outside_run_one_pass_as_a_stock_loop_does(
    name: str, opened: Any, tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, sample = opened(name)
    scale, whole = scale_of(name), sample(**scale_of(name))
    rows = counted(pipe, monkeypatch)
    part = sample(**scale, guidance_range=RANGE)
    one = [1, 1] if ROWS[name] == 1 else [2]
    assert rows == [1, *one, *one, 1, 1]
    monkeypatch.undo()
    assert not torch.allclose(part, whole, atol=1e-4)
    assert torch.equal(sample(**scale, guidance_range=[0, 1.0]), whole)
    never = sample(**scale, guidance_range=(0.0, 0.0))
    assert torch.equal(never, sample(**scale | {next(iter(scale)): OFF.get(name, 1.0)}))
    expected = stock(name, tiny_folders(name)).reshape(part.shape)
    torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwenimage", "sd3"])
def test_a_plan_counts_the_passes(
    name: str, tiny_folders: Folders, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls, operations and seconds are those of the passes that are run."""
    found: list[Any] = []
    done: list[float] = []
    extend = Sampling.with_all_steps
    monkeypatch.setattr(Sampling, "with_all_steps", lambda *args: found.append(extend(*args)) or found[-1])
    pipe = ballast.open_pipeline(tiny_folders(name), device="sim")
    width, height = tiny.FAMILIES[name].size
    plan = functools.partial(pipe.plan, width=width, height=height, steps=STEPS, guidance=SCALE, vram="64MB")
    plan = functools.partial(plan, negative_prompt="grey", rates=replace(ASSUMED, operations_per_second=1e6))
    seconds: list[float] = []
    for given, passes in (({}, 2.0), ({"guidance_range": RANGE}, 1.4), ({"guidance_range": (0, 0)}, 1.0)):
        stage = next(stage for stage in plan(**given).stages if stage.name == "sample")
        seconds.append(stage.seconds)
        unit, steps = found[-1].units["transformer"], found[-1].steps
        assert unit.calls / steps == (passes if ROWS[name] == 1 else 1)
        done.append(unit.operations.total / steps / passes)
    assert done == pytest.approx(done[:1] * 3)
    assert seconds[0] > seconds[1] > seconds[2]


def test_what_is_not_taken_is_refused(opened: Any, tiny_folders: Folders) -> None:
    """In one line, which says what is wrong."""
    pipe, sample = opened("flux")
    for given, words in (
        ({"guidance_range": 0.5}, "it takes where guidance starts and ends"),
        ({"guidance_range": (0.6, 0.2)}, "it takes where guidance starts and ends"),
        ({"guidance_range": (0.0, 1.5)}, "it takes where guidance starts and ends"),
        ({"guidance_range": RANGE}, "is not guided. Set true_cfg above 1"),
        ({"guidance_range": RANGE, "joint_attention_kwargs": {"scale": 1}, "true_cfg": 2.0}, "does not go together"),
    ):
        for call in (sample, functools.partial(pipe.plan, vram="64MB")):
            with pytest.raises(ValueError, match=f"^[^\n]*{words}[^\n]*$"):
                call(**given)
    other = ballast.open_pipeline(tiny_folders("hunyuan_video15"), device="cpu")
    with pytest.raises(ValueError, match="takes no guidance_range: HunyuanVideo15Pipeline is none of AuraFlowPipel"):
        other.plan(guidance_range=RANGE, vram="64MB")
