"""The example workflows: as ComfyUI's page saves them, and in step with the nodes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ballast.memory.charts.axes import SMALL
from ballast.nodes import BallastExtension, load_files, plan, report
from PIL import Image
from places import ROOT

FOLDER = ROOT / "workflows"
DEMO = "1 Demo without download or GPU"
FILES = sorted(FOLDER.glob("*.json"))
NODES = {node.GET_SCHEMA().node_id: node for node in asyncio.run(BallastExtension().get_node_list())}
# Present in every ComfyUI; widgets of those that have any, by what the page saves.
CORE = {"PreviewImage": 0, "SaveImage": 1, "PreviewAny": 3, "MarkdownNote": 1, "Note": 1}
CORE |= {"SaveVideo": 4, "LoadImage": 2, "ImageScale": 4, "Canny": 2}
# Widgets that offer what the user has.
OWN_FILES = ("pipeline", "llama", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "vae", "base")
OWN_FILES += ("lora", "controlnet")
FOLDERS = {part: kind for part, (kind, _) in load_files._ALL.items()} | {"lora": "loras", "controlnet": "controlnet"}
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


@dataclass(frozen=True)
class Box:
    """A node as the page draws it after a run, with its title."""

    name: str
    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


# Of ComfyUI's page at 1.49: the least that its canvas makes high. Where nothing lies below, web/grow.js makes a node
# higher, so that its prompts stay as high as they were. test_browser.py looks for overlaps in the page itself.
TITLE, SLOT, WIDGET, MARGIN, PICTURE = 30, 20, 24, 14, 224
PROMPT = 84  # a box of five lines
MAP = 1343, 642  # the left upper corner of the page's map of the graph
# What a node says takes, in pixels: lines of 16, and what is around them.
SAYS = {"BallastTextEncode": 106, "BallastVRAMPlan": 174, "BallastVRAMReport": 224}
A_LINE, SILENT = (
    94,
    {"BallastLoadPipeline", "BallastLoadModelFiles", "BallastNewbieOptions", "BallastPyramidFlowOptions"},
)
CHARTS = {  # pixels that the nodes draw
    "BallastVRAMPlan": (plan._WIDTH, plan._EACH),
    "BallastVRAMReport": (report._WIDTH, report._HEIGHT),
}
SHOWS = {"SaveImage", "SaveVideo", "PreviewImage", "LoadImage", "BallastSampler"}  # previews on


def drawn_height(node: dict[str, Any]) -> float:
    """The height without the title: as saved, or what slots, widgets, text and pictures take if that is more."""
    kind = node["type"]
    if kind in NODES:
        widgets = widgets_of(kind)
        sockets = len(NODES[kind].GET_SCHEMA().inputs) - len([name for name in widgets if ":" not in name])
        prompts = [name for name, (_, options) in widgets.items() if options.get("multiline")]
        high = WIDGET * (len(widgets) - len(prompts)) + PROMPT * len(prompts)
        high += 0 if kind in SILENT else SAYS.get(kind, A_LINE)
    else:
        sockets, high = len(node["inputs"]), WIDGET * CORE[kind]
    rows = max(sockets, len(node["outputs"]), 1)
    return max(node["size"][1], SLOT * rows + MARGIN + high + (PICTURE if kind in SHOWS else 0))


def boxes(workflow: dict[str, Any]) -> dict[int, Box]:
    return {
        node["id"]: Box(
            node["type"],
            node["pos"][0],
            node["pos"][1] - TITLE,
            node["pos"][0] + node["size"][0],
            node["pos"][1] + drawn_height(node),
        )
        for node in workflow["nodes"]
    }


@each_workflow
def test_nodes_lie_apart_after_a_run_with_previews(file: Path) -> None:
    found = list(boxes(read(file)).values())
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert not one.covers(other), (one, other)


@each_workflow
def test_a_page_of_1600_x_900_shows_all_of_it_in_letters(file: Path) -> None:
    """The page fits a graph into three quarters of itself, draws no letters below 0.57, and has a map in its corner."""
    found = boxes(read(file)).values()
    left, right = min(box.left for box in found), max(box.right for box in found)
    top, bottom = min(box.top for box in found), max(box.bottom for box in found)
    scale = min(0.75 * 1600 / (right - left + 20), 0.75 * 885 / (bottom - top + 20))
    opened = read(file)["extra"]["ds"]
    fitted = {"scale": scale, "offset": (800 / scale - (left + right) / 2, 450 / scale - (top + bottom) / 2)}
    for shown in (opened, fitted):
        assert shown["scale"] >= 0.6
        x, y = (at / shown["scale"] - moved for at, moved in zip(MAP, shown["offset"], strict=True))
        assert not [box.name for box in found if box.right > x and box.bottom > y]


@each_workflow
def test_no_link_runs_to_the_left(file: Path) -> None:
    workflow = read(file)
    found = boxes(workflow)
    for _, source, _, target, *_ in workflow["links"]:
        assert found[source].right < found[target].left, (found[source], found[target])


@each_workflow
def test_the_letters_of_a_chart_can_be_read_as_the_template_opens(file: Path) -> None:
    workflow = read(file)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for _, source, _, target, *_ in workflow["links"]:
        if nodes[source]["type"] not in CHARTS or nodes[target]["type"] != "PreviewImage":
            continue
        drawn_width, drawn_height = CHARTS[nodes[source]["type"]]
        if nodes[source]["type"] == "BallastVRAMPlan":
            place = list(widgets_of("BallastVRAMPlan")).index("vram_gb")
            drawn_height *= len(nodes[source]["widgets_values"][place].split(","))
        width, height = nodes[target]["size"]
        shown = min(width / drawn_width, (height - SLOT - 6) / drawn_height)
        assert SMALL * shown * workflow["extra"]["ds"]["scale"] >= 6.5


def test_no_file_is_left_alone() -> None:
    stems = {path.stem for path in FOLDER.iterdir()}
    assert stems == {file.stem for file in FILES}


@each_workflow
def test_the_page_can_offer_every_file_that_a_template_chooses(file: Path) -> None:
    """As ComfyUI's own templates: `models` of the loader has where a file is, and the folder that it belongs in."""
    for node in read(file)["nodes"]:
        chosen = [value for value in node.get("widgets_values") or () if str(value).endswith((".safetensors", ".gguf"))]
        listed = node["properties"].get("models", [])
        assert [entry["name"] for entry in listed] == chosen
        parts = dict(zip(widgets_of(node["type"]), node["widgets_values"], strict=True)) if listed else {}
        for entry in listed:
            assert entry.keys() == {"name", "url", "directory"}
            assert entry["url"].startswith("https://huggingface.co/") and entry["url"].endswith("/" + entry["name"])
            part = next(part for part, value in parts.items() if value == entry["name"])
            assert entry["directory"] == FOLDERS[part]
