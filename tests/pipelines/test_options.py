"""Options nodes: one for each family, and what a family's option says where another model is connected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ballast
import folder_paths
import pytest
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.options import ModelOptions, NewbieOptions, PyramidFlowOptions, SamplerOptions, in_widgets
from ballast.nodes.sample import Sampler
from ballast.pipelines.options import OWNERS, UnknownOptionError
from host import run_node
from import_pack import ROOT

Folders = Callable[[str], Path]
FAMILY_NODES = {"NewBie": NewbieOptions, "Pyramid-Flow": PyramidFlowOptions}
CHANGED: dict[str, Any] = {
    "sampler": "midpoint", "shift": 2.0, "cfg_trunc": 0.5, "renorm_cfg": 1.0,
    "first_frame_steps": "2,2,2", "video_steps": "1,1,1", "video_guidance": 4.0, "linear_guidance": True,
}  # fmt: skip
TOLD = {
    "sampler": "set it to auto", "shift": "set it to 0", "cfg_trunc": "set it to 1", "renorm_cfg": "set it to 0",
    "first_frame_steps": "empty it", "video_steps": "empty it", "video_guidance": "set it to 5",
    "linear_guidance": "turn it off",
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tiny_folders: Folders) -> Iterator[Any]:
    link = Path(folder_paths.get_folder_paths("diffusers")[0]) / "flux"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tiny_folders("flux"), target_is_directory=True)
    yield run_node(LoadPipeline, pipeline="flux", device="cpu").result[0]
    link.unlink()


def ids(node: Any) -> list[str]:
    return [slot.id for slot in node.GET_SCHEMA().inputs]


def test_each_family_has_the_options_that_are_its_own() -> None:
    compute = ids(ModelOptions)
    assert compute == ["compile", "attention"]
    for family, node in FAMILY_NODES.items():
        own = [name for name in ids(node) if name not in compute]
        assert own and {OWNERS[name] for name in own} == {family}
    new = {name for node in (ModelOptions, *FAMILY_NODES.values()) for name in ids(node)}
    assert new == set(ids(SamplerOptions)), "the old node has them all"
    assert SamplerOptions.GET_SCHEMA().is_deprecated
    assert not any(node.GET_SCHEMA().is_deprecated for node in (ModelOptions, *FAMILY_NODES.values()))


@pytest.mark.parametrize("node", [ModelOptions, NewbieOptions, PyramidFlowOptions, SamplerOptions])
def test_what_is_left_alone_is_left_out(node: Any) -> None:
    assert run_node(node).result[0] == {}
    changed = {name: value for name, value in CHANGED.items() if name in ids(node)} | {"compile": True}
    assert run_node(node, **changed).result[0] == changed


@pytest.mark.parametrize("name", sorted(CHANGED.keys() - {"shift"}))  # which models of flow matching take as well
def test_an_option_of_another_family_is_told_in_widgets(name: str, reference: Any) -> None:
    cond = run_node(TextEncode, pipeline=reference, prompt="a boat", negative_prompt="").result[0]
    options = run_node(FAMILY_NODES[OWNERS[name]], **{name: CHANGED[name]}).result[0]
    with pytest.raises(ValueError) as caught:
        run_node(Sampler, pipeline=reference, conditioning=cond, steps=1, options=options)
    assert str(caught.value) == f"{name} is for {OWNERS[name]}, not for flux: {TOLD[name]}."


def test_several_at_once_and_in_a_library_call(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("flux"), device="cpu")
    cond = pipe.encode("a boat")
    with pytest.raises(TypeError, match="^sampler is for NewBie, not for flux: leave it out.$"):
        pipe.sample(cond, steps=1, sampler="euler")
    with pytest.raises(UnknownOptionError, match="leave it out. flux has no argument eta. It takes: .*sigmas"):
        pipe.sample(cond, steps=1, cfg_trunc=0.5, eta=1.0)
    told = in_widgets(UnknownOptionError("flux", ["shift", "video_steps"], ()))
    assert str(told) == (
        "shift is for NewBie, not for flux: set it to 0; video_steps is for Pyramid-Flow, not for flux: empty it."
    )


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.json")), ids=lambda path: path.stem)
def test_example_workflows_have_the_node_of_their_family(path: Path) -> None:
    nodes = json.loads(path.read_text("utf-8"))["nodes"]
    kinds = {node["type"] for node in nodes}
    assert "BallastSamplerOptions" not in kinds
    for node in nodes:
        for kind in (NewbieOptions, PyramidFlowOptions):
            if node["type"] == kind.GET_SCHEMA().node_id:
                assert len(node["widgets_values"]) == len(ids(kind))
