"""The templates with LoRAs and a ControlNet, run on tiny models. The core's nodes in them are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import pytest
import torch
from host import run_node
from pictured.pictures import picture
from places import ROOT, clear
from selection import few
from single_files.comfy_folders import base_for, put_files
from test_workflows import NODES, widgets_of

pytestmark = pytest.mark.long
STEMS = ("10 Wan 2.2 video in 4 steps", "11 Qwen-Image with a Lightning LoRA", "12 Flux with a ControlNet")
MADE_UP = ("LoadImage", "Canny")
KINDS = ("diffusers", "diffusion_models", "text_encoders", "vae", "loras", "controlnet")
SMALL = {"width": 64, "height": 64, "frames": 9}


@pytest.fixture(scope="module", autouse=True)
def models(tiny_folders: Callable[[str], Path]) -> Iterator[Path]:
    root = Path(folder_paths.models_dir)
    put_files(root, tiny_folders)
    yield root
    for kind in KINDS:
        clear(root / kind)


def ran(workflow: dict[str, Any]) -> tuple[dict[int, Any], dict[str, dict[str, Any]]]:
    """The results of all nodes by id, and what each kind of node was given."""
    sources = {link[0]: (link[1], link[2]) for link in workflow["links"]}
    results: dict[int, Any] = {}
    given: dict[str, dict[str, Any]] = {}
    for node in sorted(workflow["nodes"], key=lambda node: node["order"]):
        kind = node["type"]
        if kind in MADE_UP:
            results[node["id"]] = (picture(96, 64),)
        if kind not in NODES:
            continue
        names = [name for name in widgets_of(kind) if ":" not in name]
        values = [value for value in node.get("widgets_values", []) if value != "fixed"]
        inputs = dict(zip(names, values, strict=True))
        inputs |= {name: value for name, value in SMALL.items() if inputs.get(name)}
        if kind == "BallastLoadModelFiles":
            inputs |= {"base": base_for(inputs["transformer"]), "device": "sim", "keep_loaded": False}
        for slot in node["inputs"]:
            if slot["link"] is not None:
                source, at = sources[slot["link"]]
                inputs[slot["name"]] = results[source][at]
        results[node["id"]] = run_node(NODES[kind], node_id=str(node["id"]), **inputs).result
        given.setdefault(kind, inputs)
    return results, given


@pytest.mark.parametrize("stem", few(STEMS, STEMS[2]))
def test_a_template_runs(stem: str, sim: ModuleType) -> None:
    workflow = json.loads((ROOT / "workflows" / f"{stem}.json").read_text("utf-8"))
    results, given = ran(workflow)
    (decoder,) = [node["id"] for node in workflow["nodes"] if node["type"] == "BallastVAEDecode"]
    images = results[decoder][0]
    assert images.std() > 0.01 and torch.isfinite(images).all()
    reference = given["BallastSampler"]["pipeline"]
    assert len(reference.loras) == {"10": 2, "11": 1, "12": 0}[stem[:2]]
    assert [control.part for control in reference.controls] == ([(0, 0.65)] if stem[:2] == "12" else [])
    for node in workflow["nodes"]:  # the LoRAs and the ControlNet count
        if node["type"] in ("BallastLoadLoRA", "BallastApplyControlNet"):
            node["widgets_values"][1] = 0
    assert not torch.equal(ran(workflow)[0][decoder][0], images)
    assert sim.stats().allocated_bytes == 0
