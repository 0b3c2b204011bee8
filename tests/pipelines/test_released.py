"""The table of verdicts: what it says is what the comparison says, and what it knows is compared no more.

    UPDATE_VERDICTS=1 BALLAST_SOAK=1 .venv/bin/python -m pytest tests/pipelines/test_released.py

writes it anew, in some 20 minutes, and drops the verdicts of other versions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ballast
import pytest
from ballast.bench.downloads import full_size, published_folders
from ballast.pipelines.encoding.pictures import Pictures
from ballast.pipelines.equivalence import check, released
from ballast.pipelines.equivalence.verdicts import Verdict
from ballast.pipelines.models.diffusers.diffusers_model import DiffusersModel
from pictured.pictures import picture

UPDATES = bool(os.environ.get("UPDATE_VERDICTS"))
FOLDERS = [f"folder {name}" for name in (*full_size.FULL_SIZE, *full_size.EDIT_PARTS)]  # with encoders as on the Hub
MODELS = [*published_folders.MODELS, *FOLDERS]
TASKS: dict[str, dict[str, Any]] = {
    "": {},
    "image": {"image": True},
    "image to replace": {"image": True, "strength": 0.5},
    "mask": {"image": True, "mask": True, "strength": 0.5},
    "first and last": {"image": True, "last_image": True},
    "reference": {"references": True},
}


def build(name: str, folder: Path) -> Path:
    kind, _, model = name.rpartition(" ")
    return full_size.build(model, folder) if kind else published_folders.build(name, folder)


def pictures(task: dict[str, Any]) -> Pictures:
    one = (picture(64, 64),)
    return Pictures(**{name: value if name == "strength" else one for name, value in task.items()})


def compared(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Verdict]:
    """Return the verdict by the key of each comparison of a model and of its sisters that take pictures."""
    asked, kept = [], {}

    def see(model: DiffusersModel, texts: DiffusersModel, kind: str, task: Mapping[str, Any]) -> None:
        asked.append(released.key_of(model, texts, kind, task))

    def keep(directory: Path | None, key: str | None, verdict: Verdict) -> None:
        if directory and key:  # else it may have been the machine
            kept[asked[-1]] = verdict

    monkeypatch.setattr(released, "recall", see)
    monkeypatch.setattr(check.verdicts, "keep", keep)
    monkeypatch.setattr(check.verdicts, "recall", lambda *_: None)
    try:
        pipe = ballast.open_pipeline(folder, device="cpu", cache_dir=cache)
    except ValueError as error:
        print(f"{folder}: {error}")
        return {}
    for name, task in TASKS.items():
        try:
            inputs = pipe.model.inputs_of(pictures(task))
            inputs.model.batch_differs(pipe.model, inputs.own)
            check.cut_differs(inputs.model, pipe.model)
        except (ValueError, TypeError) as error:
            print(f"{pipe.name}, {name}: {error}")
    return kept


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_what_the_table_says_is_what_the_comparison_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(name, tmp_path / "model")
    found = {key: released.entry(verdict) for key, verdict in compared(folder, tmp_path / "cache", monkeypatch).items()}
    known = json.loads(released.TABLE.read_text("utf-8"))
    if UPDATES:
        text = json.dumps(dict(sorted({**known, **found}.items())), indent=1)
        released.TABLE.write_text(text + "\n", "utf-8")
    else:
        assert found, "nothing was compared"
        for key, verdict in found.items():
            assert known.get(key) == verdict, f"{name}: UPDATE_VERDICTS=1"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("folder flux", tmp_path_factory.mktemp("known") / "model")


def count_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets an entry for each comparison from now on, which then ends with an error."""
    begun: list[str] = []

    def begin(*_: Any) -> Verdict:
        begun.append("compared")
        raise RuntimeError("compared")

    monkeypatch.setattr(check.verdicts, "_known", {})  # of other tests in this process
    monkeypatch.setattr(check, "rehearse", begin)
    monkeypatch.setattr(check, "compare_batch", begin)
    return begun


def test_what_the_table_knows_is_not_compared(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = count_comparisons(monkeypatch)
    model = ballast.open_pipeline(known, device="cpu", cache_dir=tmp_path).model
    assert model.looks is False and model.latent_dimensions == 4
    assert model.batch_differs(model, ()) == ""
    assert model.inputs_of(pictures(TASKS["image to replace"])).model.looks
    assert not begun


def test_another_config_or_code_is_compared(known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ballast.open_pipeline(known, device="cpu", cache_dir=tmp_path).model
    keys = {released.key_of(model, model, "stages", {})}
    config = model.components["transformer"].config
    for name, value in (("guidance_embeds", False), ("in_channels", 128)):
        monkeypatch.setitem(config, name, value)
        keys.add(released.key_of(model, model, "stages", {}))
    monkeypatch.setitem(model.components["text_encoder_2"].config, "d_model", 2048)
    keys.add(released.key_of(model, model, "stages", {}))
    monkeypatch.setattr(released, "_code", lambda cls: f"edited {cls.__name__}")
    keys.add(released.key_of(model, model, "stages", {}))
    assert len(keys) == 5
    begun = count_comparisons(monkeypatch)
    with pytest.raises(ValueError, match="cannot be staged"):
        ballast.open_pipeline(known, device="cpu", cache_dir=tmp_path / "other")
    assert begun


def test_notes_and_defaults_of_a_config_change_no_key(known: Path, tmp_path: Path) -> None:
    """As folders have them that other versions wrote."""
    model = ballast.open_pipeline(known, device="cpu", cache_dir=tmp_path).model
    key = released.key_of(model, model, "stages", {})
    config = model.components["transformer"].config
    assert config.pop("patch_size") == 1 and config.setdefault("_diffusers_version", "0.30.0")
    t5 = model.components["text_encoder_2"].config
    t5 |= {"output_past": True, "transformers_version": "4.43.0", "task_specific_params": {}}
    assert released.key_of(model, model, "stages", {}) == key
