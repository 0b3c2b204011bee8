"""The drawings of docs/how-it-works.md and of the registry: what docs/drawings.py draws, and the rules of the ring."""

from __future__ import annotations

import io
import runpy
from types import SimpleNamespace

import pytest
from PIL import Image
from places import ROOT
from thumbnails import is_alike


@pytest.fixture(scope="module")
def drawings() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "drawings.py"), run_name="drawings"))


@pytest.mark.parametrize("name", ["stages", "ring", "icon", "banner"])
def test_pictures_are_what_the_script_draws(name: str, drawings: SimpleNamespace) -> None:
    now = io.BytesIO()
    getattr(drawings, f"draw_{name}")().savefig(now, format="png")
    with Image.open(ROOT / "docs" / "pictures" / f"{name}.png") as kept, Image.open(now) as drawn:
        assert is_alike(kept, drawn), "run: python docs/drawings.py"


def test_the_schedule_keeps_the_two_rules_of_the_ring(drawings: SimpleNamespace) -> None:
    passes, copy = drawings.passes(4), drawings.COPY
    size = dict(zip(drawings.STREAMED, drawings.SLOTS, strict=True))
    assert len({one.slot for one in passes}) > 1 and max(one.slot + size[one.group] for one in passes) <= drawings.RING
    for i, one in enumerate(passes):
        assert one.copy + copy <= one.call, "a call waits for its copy"
        for before in passes[:i]:
            assert before.copy + copy <= one.copy, "one copy at a time"
            if before.slot < one.slot + size[one.group] and one.slot < before.slot + size[before.group]:
                assert before.call + 1 <= one.copy, "a copy waits for the last use of the bytes that it overwrites"
