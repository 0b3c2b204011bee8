"""Every pipeline class of diffusers, built tiny by diffusers' own tests: staged as stock runs it, or refused.

Needs a checkout of diffusers, whose folder the environment variable DIFFUSERS_TESTS names; some classes need
torchvision or opencv. With UPDATE_CLASSES=1 the verdicts are written to `tests/data/pipeline_classes.json`:

    DIFFUSERS_TESTS=~/diffusers UPDATE_CLASSES=1 python -m pytest tests/pipelines/test_classes.py -k Flux
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
from pipeline_classes.catalogue import Testers, find_testers, public_classes
from pipeline_classes.judging import GOOD, judge
from pipeline_classes.own_testers import own_testers
from pipeline_classes.page import filled
from places import ROOT

TABLE = Path(__file__).parents[1] / "data" / "pipeline_classes.json"
PAGES = [ROOT / "docs" / "pipelines.md", ROOT / "docs" / "zh" / "pipelines.md"]
CHECKOUT = os.environ.get("DIFFUSERS_TESTS")
UPDATE = bool(os.environ.get("UPDATE_CLASSES"))
_PACKAGES = ("torchvision", "opencv", "ftfy", "scipy", "sentencepiece")  # that a test may lack


def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text("utf-8"))


@functools.cache
def known_testers() -> Testers:
    found, failed = find_testers(Path(CHECKOUT or "").expanduser())
    for line in failed:
        warnings.warn(line, stacklevel=1)
    return found | own_testers()


@pytest.mark.skipif(not CHECKOUT, reason="DIFFUSERS_TESTS names no checkout of diffusers")
@pytest.mark.parametrize("name", public_classes() if CHECKOUT else ["all"])
def test_staged_equals_stock_or_is_refused(name: str, sim: ModuleType, tmp_path: Path) -> None:
    verdict = judge(public_classes()[name], known_testers(), tmp_path, sim)
    entry = {"verdict": verdict.word, "reason": verdict.reason, "diffusers": diffusers.__version__}
    if verdict.word == "not built" and any(package in verdict.reason.lower() for package in _PACKAGES):
        pytest.skip(verdict.reason)
    if UPDATE:
        written = table() | {name: entry}
        lines = (f"{json.dumps(key)}: {json.dumps(written[key])}" for key in sorted(written))
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
        for path in PAGES:
            path.write_text(filled(path.read_text("utf-8"), written), "utf-8")
        return
    recorded = table().get(name)
    assert recorded is not None, f"{name} is not in the table; write it with UPDATE_CLASSES=1"
    assert verdict.word == recorded["verdict"], verdict.reason


def test_no_class_is_wrong_or_unclear() -> None:
    """Each class is equal to stock, or refused when it is opened; what is not compared says why."""
    wrong = {name: entry["reason"] for name, entry in table().items() if entry["verdict"] not in GOOD}
    assert not wrong
    assert not [name for name, entry in table().items() if entry["verdict"] != "equal" and not entry["reason"]]


# Refused for what their code does: no tests of diffusers build them tiny.
_BY_CODE = {"Ideogram4Pipeline", "ZImageControlNetPipeline", "ZImageControlNetInpaintPipeline"}


def test_nine_of_ten_transformer_classes_are_equal() -> None:
    """Of those that draw from text, and can be built tiny, with ConsisID, whose code needs opencv: 115 of 125."""
    words = {
        name: entry["verdict"]
        for name, entry in table().items()
        if name not in _BY_CODE
        if name not in public_classes()  # for want of its package
        or any(part.startswith("transformer") for part in inspect.signature(public_classes()[name].__init__).parameters)
    }
    equal, refused = (list(words.values()).count(word) for word in ("equal", "refused"))
    assert words["ConsisIDPipeline"] == "refused"
    assert equal >= 0.92 * (equal + refused), f"{equal} of {equal + refused}"


def test_every_class_with_a_text_is_in_the_table() -> None:
    versions = {entry["diffusers"] for entry in table().values()}
    if diffusers.__version__ not in versions:
        pytest.skip(f"the table is of diffusers {', '.join(sorted(versions))}")
    texts = {n for n, cls in public_classes().items() if "prompt" in inspect.signature(cls.__call__).parameters}
    assert texts <= table().keys()


@pytest.mark.parametrize("path", PAGES, ids=["en", "zh"])
def test_the_page_has_every_class(path: Path) -> None:
    page = path.read_text("utf-8")
    assert page == filled(page, table())
    assert not [name for name in table() if name not in page]
