"""The blueprints that ComfyUI lists among its nodes: one node each, whose subgraph agrees with the schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from test_workflows import NODES, read, widgets_of

FILES = sorted((ROOT / "subgraphs").glob("*.json"))
INPUTS, OUTPUTS = -10, -20  # what the page calls the ends of a subgraph

each_blueprint = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])


def subgraph_of(file: Path) -> dict[str, Any]:
    (subgraph,) = read(file)["definitions"]["subgraphs"]
    return subgraph


def schema_slots(node_type: str) -> dict[str, str]:
    """The inputs of a node by name, with their types."""
    groups = NODES[node_type].INPUT_TYPES()
    return {name: kind for group in ("required", "optional") for name, (kind, *_) in groups.get(group, {}).items()}


def outputs_of(node_type: str) -> list[tuple[str, str]]:
    schema = NODES[node_type].GET_SCHEMA()
    return [(slot.display_name or slot.id, slot.get_io_type()) for slot in schema.outputs]


def test_there_are_those_that_the_pages_name() -> None:
    names = {"Text to image in a budget", "Edit a picture", "Picture to video", "Plan my model"}
    assert {file.stem for file in FILES} == names == {path.stem for path in (ROOT / "subgraphs").iterdir()}
    for page in ("docs/nodes.md", "docs/zh/nodes.md"):
        assert all(name in (ROOT / page).read_text("utf-8") for name in names), page
    assert len({subgraph_of(file)["id"] for file in FILES}) == len(FILES)


@each_blueprint
def test_it_is_one_node_that_shows_what_its_subgraph_takes(file: Path) -> None:
    blueprint, subgraph = read(file), subgraph_of(file)
    (outer,) = blueprint["nodes"]
    assert outer["type"] == subgraph["id"] and outer["title"] == subgraph["name"] == file.stem
    assert blueprint["links"] == [] and subgraph["description"] and subgraph["category"] == "Ballast"
    for ends in ("inputs", "outputs"):
        shown, taken = ([(slot["name"], slot["type"]) for slot in of[ends]] for of in (outer, subgraph))
        assert shown == taken
        assert len({slot["name"] for slot in outer[ends]}) == len(outer[ends])
    nodes = {str(node["id"]): node for node in subgraph["nodes"]}
    proxies = outer["properties"]["proxyWidgets"]
    of_inputs = [proxy for proxy in proxies if proxy[1] != "control_after_generate"]
    assert [name for _, name in of_inputs] == [slot["name"] for slot in outer["inputs"] if "widget" in slot]
    for node, name in of_inputs:
        assert name in widgets_of(nodes[node]["type"])
    for node, name in proxies[len(of_inputs) :]:
        assert "seed: after" in widgets_of(nodes[node]["type"]), name


@each_blueprint
def test_its_nodes_agree_with_the_schemas(file: Path) -> None:
    for node in subgraph_of(file)["nodes"]:
        kind, slots, widgets = node["type"], schema_slots(node["type"]), widgets_of(node["type"])
        assert {slot["name"]: slot["type"] for slot in node["inputs"]} == slots, kind
        assert [slot["name"] for slot in node["inputs"]] == list(slots)
        assert [slot["name"] for slot in node["inputs"] if "widget" in slot] == [
            name for name in widgets if ":" not in name
        ]
        assert [(slot["name"], slot["type"]) for slot in node["outputs"]] == outputs_of(kind)
        assert len(node["widgets_values"]) == len(widgets)
        for value, (name, (of, options)) in zip(node["widgets_values"], widgets.items(), strict=True):
            if of == "COMBO":
                assert value == options["default"], f"{name}: what a user has is not known"
            elif of in ("INT", "FLOAT"):
                assert options["min"] <= value <= options["max"], name
            else:
                assert isinstance(value, {"BOOLEAN": bool}.get(of, str)), name


@each_blueprint
def test_its_links_agree_at_both_ends(file: Path) -> None:
    subgraph = subgraph_of(file)
    nodes = {node["id"]: node for node in subgraph["nodes"]}
    assert len({link["id"] for link in subgraph["links"]}) == len(subgraph["links"])
    for link in subgraph["links"]:
        number, source, target = link["id"], link["origin_id"], link["target_id"]
        into, out = link["origin_slot"], link["target_slot"]
        begin = subgraph["inputs"][into] if source == INPUTS else nodes[source]["outputs"][into]
        end = subgraph["outputs"][out] if target == OUTPUTS else nodes[target]["inputs"][out]
        assert number in (begin["linkIds"] if source == INPUTS else begin["links"])
        assert number in end["linkIds"] if target == OUTPUTS else number == end["link"]
        assert begin["type"] == link["type"] and link["type"] in end["type"].split(","), link
        if source == INPUTS:
            assert begin["name"] == end["name"], "the node is labelled as what it sets"
    numbers = {link["id"] for link in subgraph["links"]}
    said = {slot["link"] for node in nodes.values() for slot in node["inputs"]} - {None}
    said |= {number for end in ("inputs", "outputs") for slot in subgraph[end] for number in slot["linkIds"]}
    assert said == numbers
    for node in nodes.values():
        required = {slot.id for slot in NODES[node["type"]].GET_SCHEMA().inputs if not slot.optional}
        linked = {slot["name"] for slot in node["inputs"] if slot["link"] is not None}
        assert required <= linked | widgets_of(node["type"]).keys(), node["type"]
