"""The example workflows: as ComfyUI's page saves them, and in step with the nodes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from ballast.nodes import BallastExtension
from PIL import Image
from places import ROOT

FOLDER = ROOT / "workflows"
DEMO = "1 Demo without download or GPU"
FILES = sorted(FOLDER.glob("*.json"))
NODES = {node.GET_SCHEMA().node_id: node for node in asyncio.run(BallastExtension().get_node_list())}
# Present in every ComfyUI; widgets of those that have any, by what the page saves.
CORE = {"PreviewImage": 0, "SaveImage": 1, "PreviewAny": 3, "MarkdownNote": 1, "Note": 1}
CORE |= {"SaveVideo": 4, "LoadImage": 2, "ImageScale": 4}
# Widgets that offer what the user has.
OWN_FILES = ("pipeline", "llama", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "vae", "base")
SOCKETS_ONLY = {
    "MASK",
    "IMAGE",
    "LATENT",
    "*",
    "COMFY_MATCHTYPE_V3",
    "BALLAST_PIPELINE",
    "BALLAST_CONDITIONING",
    "BALLAST_OPTIONS",
}

each_workflow = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


def widgets_of(node_type: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Inputs of a node that the page draws as widgets, in the order in which it saves their values."""
    groups = NODES[node_type].INPUT_TYPES()
    slots = {**groups.get("required", {}), **groups.get("optional", {})}
    found = {}
    for name, (kind, options) in slots.items():
        if kind not in SOCKETS_ONLY and "," not in kind:
            found[name] = (kind, options)
            if options.get("control_after_generate"):
                found[f"{name}: after"] = ("CONTROL", {})
    return found


def test_there_is_a_demo() -> None:
    assert FILES[0].stem == DEMO


@each_workflow
def test_nodes_are_known(file: Path) -> None:
    types = {node["type"] for node in read(file)["nodes"]}
    assert types <= NODES.keys() | CORE.keys()
    assert types & NODES.keys()


@each_workflow
def test_widgets_agree_with_the_schemas(file: Path) -> None:
    for node in read(file)["nodes"]:
        values = node.get("widgets_values", [])
        if node["type"] in CORE:
            assert len(values) <= CORE[node["type"]]
            continue
        widgets = widgets_of(node["type"])
        assert len(values) == len(widgets), node["type"]
        for value, (name, (kind, options)) in zip(values, widgets.items(), strict=True):
            if kind == "CONTROL":
                assert value == "fixed", "the picture that the thumbnail shows comes again"
            elif kind == "COMBO":
                assert value in options["options"] or name in OWN_FILES, name
            elif kind in ("INT", "FLOAT"):
                assert options["min"] <= value <= options["max"], name
            else:
                assert isinstance(value, {"STRING": str, "BOOLEAN": bool}[kind]), name


@each_workflow
def test_links_agree_with_the_schemas(file: Path) -> None:
    workflow = read(file)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    targets = set()
    for link, source, out_slot, target, in_slot, kind in workflow["links"]:
        output, entry = nodes[source]["outputs"][out_slot], nodes[target]["inputs"][in_slot]
        assert link in output["links"] and entry["link"] == link
        assert (target, in_slot) not in targets
        targets.add((target, in_slot))
        for node, slots, name in ((nodes[source], "outputs", output["name"]), (nodes[target], "inputs", entry["name"])):
            if node["type"] in NODES:
                schema = NODES[node["type"]].GET_SCHEMA()
                assert name in {word for slot in getattr(schema, slots) for word in (slot.id, slot.display_name)}
        assert kind == output["type"] or "*" in (kind, output["type"])
    for node in nodes.values():
        if node["type"] in NODES:
            required = {slot.id for slot in NODES[node["type"]].GET_SCHEMA().inputs if not slot.optional}
            linked = {entry["name"] for entry in node["inputs"] if entry["link"] is not None}
            assert required <= linked | widgets_of(node["type"]).keys(), node["type"]


@each_workflow
def test_a_thumbnail_lies_beside_it(file: Path) -> None:
    thumbnail = file.with_suffix(".jpg")
    assert thumbnail.stat().st_size < 60_000
    with Image.open(thumbnail) as picture:
        assert picture.format == "JPEG"
        assert 0.8 <= picture.width / picture.height <= 1.25
        assert min(picture.size) >= 256


@each_workflow
def test_nodes_lie_apart(file: Path) -> None:
    """No node covers another; titles are 30 high and lie above."""
    boxes = [(n["pos"][0], n["pos"][1] - 30, n["pos"][0] + n["size"][0], n["pos"][1] + n["size"][1])
             for n in read(file)["nodes"]]  # fmt: skip
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)


def test_no_file_is_left_alone() -> None:
    stems = {path.stem for path in FOLDER.iterdir()}
    assert stems == {file.stem for file in FILES}
