"""The pack in a real ComfyUI, over HTTP: as its users meet it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ballast.memory.host.contract import version
from host import HostError, HostServer, find_host, host_python, missing
from PIL import Image
from places import DATA, ROOT, STUBS
from shape_judge import judge
from single_files.comfy_folders import base_for, put_templates

SCHEMAS = DATA / "node_schemas.json"
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
BLUEPRINTS = sorted(path.stem for path in (ROOT / "subgraphs").glob("*.json"))
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


@pytest.fixture(scope="module")
def host(tiny_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServer]:
    if reason := missing():
        pytest.skip(reason)
    base = tmp_path_factory.mktemp("comfyui")
    put_templates(base, tiny_folders)
    (base / "models" / "diffusers" / "lumina2").symlink_to(tiny_folders("lumina2"), target_is_directory=True)
    with HostServer(base=base) as server:
        yield server


pytestmark = pytest.mark.host


def as_prompt(workflow: dict[str, Any], host: HostServer) -> dict[str, Any]:
    """The form that the page queues, of a workflow as the page saves it."""
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in ("Note", "MarkdownNote"):
            continue
        groups = host.object_info(node["type"])["input"]
        values = iter(node.get("widgets_values") or [])
        inputs = {}
        for name, (kind, *more) in (groups.get("required", {}) | groups.get("optional", {})).items():
            if kind in WIDGETS or isinstance(kind, list):
                inputs[name] = next(values)
                if more and more[0].get("control_after_generate"):
                    next(values)
        if node["type"] == "SaveVideo":  # its widgets depend on each other, and the page saves them by name
            inputs = dict(node["widgets_values_named"])
        linked = {
            slot["name"]: sources[slot["link"]] for slot in node.get("inputs", []) if slot.get("link") is not None
        }
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs | linked}
    return prompt


def graph(**sampling: Any) -> dict[str, Any]:
    """A small graph around the tiny pipeline, on the simulated device."""
    node = {"pipeline": "lumina2", "vram_gb": 0, "dtype": "auto", "keep_loaded": True, "device": "sim"}
    sampler = {"width": 48, "height": 32, "steps": 2, "guidance": 4, "seed": 0, "frames": 0, "strategy": "auto"}
    return {
        "load": {"class_type": "BallastLoadPipeline", "inputs": node},
        "encode": {
            "class_type": "BallastTextEncode",
            "inputs": {"pipeline": ["load", 0], "prompt": "a red boat", "negative_prompt": ""},
        },
        "sample": {
            "class_type": "BallastSampler",
            "inputs": {"pipeline": ["load", 0], "conditioning": ["encode", 0], **sampler, **sampling},
        },
        "decode": {"class_type": "BallastVAEDecode", "inputs": {"pipeline": ["load", 0], "latent": ["sample", 0]}},
        "preview": {"class_type": "PreviewImage", "inputs": {"images": ["decode", 0]}},
    }


FREE = {
    "class_type": "BallastFreeVRAM",
    "inputs": {"text_encoders": True, "transformers": True, "vaes": True, "host_models": True},
}


def pictures(entry: dict[str, Any], host: HostServer) -> list[Image.Image]:
    found = []
    for outputs in entry["outputs"].values():
        for image in outputs.get("images", []):
            path = host.base / image["type"] / image["subfolder"] / image["filename"]
            if path.suffix != ".mp4":
                found.append(Image.open(path).convert("RGB"))
            else:
                assert path.stat().st_size > 0
    return found


def release(root: Path | None) -> tuple[int, ...]:
    """The version of the ComfyUI in a folder, or of the one that the stand-ins are like."""
    assert root is not None
    return tuple(int(part) for part in (version(root) or "0").split("."))


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_the_host_imports_the_pack(host: HostServer) -> None:
    assert not host.import_failed


def test_every_node_is_as_in_the_snapshot(host: HostServer) -> None:
    for name, expected in json.loads(SCHEMAS.read_text("ascii")).items():
        info = {key: value for key, value in host.object_info(name).items() if value is not None}
        assert info.pop("python_module") == "custom_nodes.ComfyUI-Ballast"
        if name == "BallastLoadPipeline":
            offered = info["input"]["required"]["pipeline"][1].pop("options")
            assert offered == [
                "demo: shapes",
                "HiDream-I1-Fast",
                "NewBie-image-Exp0.1",
                "lumina2",
                "pyramid-flow-miniflux",
                "tiny-flux",
                "tiny-qwen_image_edit",
                "tiny-qwen_image_fp",
                "tiny-wan",
                "tiny-wan_t2v",
            ]
            llama = info["input"]["optional"]["llama"][1]
            assert llama["options"].pop() == "Meta-Llama-3.1-8B-Instruct"
        # Lists of files, which templates and other tests put there.
        for group in ("required", "optional"):
            for key, (kind, wanted) in expected["input"].get(group, {}).items():
                if kind == "COMBO" and wanted.get("options", []) in ([], ["none"], ["choose a file"]):
                    given = info["input"][group][key][1]
                    for fact in ("options", "default"):
                        given.pop(fact, None)
                        given |= {fact: wanted[fact]} if fact in wanted else {}
        if "has_intermediate_output" not in info:  # ComfyUI 0.14 does not tell it
            expected.pop("has_intermediate_output")
        assert info == expected


def test_stand_ins_agree_with_the_host(host: HostServer) -> None:
    """What tests/stubs defines exists in the host, with the same parameters and defaults."""
    if release(find_host()) < release(STUBS):
        pytest.skip("a host older than the one that the stand-ins are like")
    answers = []
    for folder in (STUBS, find_host()):
        command = [host_python(), str(STUBS / "parity.py"), str(folder)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        answers.append(json.loads(ran.stdout[ran.stdout.index("{") :]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("file", WORKFLOWS, ids=[file.stem for file in WORKFLOWS])
def test_workflow_runs(file: Path, host: HostServer) -> None:
    templates = {pack: sorted(names) for pack, names in host.get("/workflow_templates").items()}
    assert templates == {"ComfyUI-Ballast": sorted(file.stem for file in WORKFLOWS)}
    prompt = as_prompt(json.loads(file.read_text("utf-8")), host)
    if "wan" in str(prompt) and subprocess.run([host_python(), "-c", "import ftfy"], capture_output=True).returncode:
        pytest.skip("diffusers' Wan needs ftfy, which this Python lacks")
    for node in prompt.values():
        for side, large in (("width", (1024, 832, 640)), ("height", (1024, 480, 384))):
            edits = "image_edit" in str(prompt) and side in node["inputs"]  # which draws a megapixel by itself
            if edits or node["inputs"].get(side) in large:  # these models are tiny
                node["inputs"][side] = 128
        if "base" in node["inputs"]:  # and their configs do not come with the pack
            node["inputs"]["base"] = base_for(node["inputs"]["transformer"])
        if node["inputs"].get("frames"):
            node["inputs"]["frames"] = 9
    entry = host.run(prompt, timeout=300)
    found = pictures(entry, host)
    assert (found or "SaveVideo" in str(prompt)) and all(np.asarray(picture).std() > 5 for picture in found), (
        "nothing is a plain surface"
    )


def blueprint_prompt(blueprint: dict[str, Any], host: HostServer) -> dict[str, Any]:
    """The nodes of a blueprint's subgraph as a prompt, with the values that it comes with."""
    (subgraph,) = blueprint["definitions"]["subgraphs"]
    ends = ("origin_id", "origin_slot", "target_id", "target_slot")
    inside = [link for link in subgraph["links"] if link["origin_id"] > 0 < link["target_id"]]
    links = {link["id"]: [link["id"], *(link[end] for end in ends), link["type"]] for link in inside}
    for slot in (slot for node in subgraph["nodes"] for slot in node["inputs"]):
        slot["link"] = slot["link"] if slot["link"] in links else None
    return as_prompt({"nodes": subgraph["nodes"], "links": list(links.values())}, host)


def test_blueprints_are_listed_and_those_of_the_demo_model_run(host: HostServer) -> None:
    listed = {
        entry["name"]: number
        for number, entry in host.get("/global_subgraphs").items()
        if entry["info"]["node_pack"] == "custom_nodes.ComfyUI-Ballast"
    }
    assert sorted(listed) == BLUEPRINTS
    told = {name: json.loads(host.get(f"/global_subgraphs/{number}")["data"]) for name, number in listed.items()}
    draws = blueprint_prompt(told["Text to image in a budget"], host)
    (decoder,) = [name for name, node in draws.items() if node["class_type"] == "BallastVAEDecode"]
    draws["shown"] = {"class_type": "PreviewImage", "inputs": {"images": [decoder, 0]}}
    (picture,) = pictures(host.run(draws, timeout=300), host)
    assert picture.size == (64, 64) and np.asarray(picture).std() > 5
    plans = blueprint_prompt(told["Plan my model"], host)
    (planner,) = [name for name, node in plans.items() if node["class_type"] == "BallastVRAMPlan"]
    plans[planner]["inputs"]["vram_gb"] = "4MB"
    assert "4.00 MB" in host.run(plans)["outputs"][planner]["text"][0]


def test_demo_draws_what_it_says_and_is_cached(host: HostServer) -> None:
    prompt = as_prompt(json.loads(WORKFLOWS[0].read_text("utf-8")), host)
    ids = {node["class_type"]: name for name, node in prompt.items()}
    prompt[ids["BallastSampler"]]["inputs"]["seed"] = 2
    entry = host.run(prompt, timeout=300)
    (picture,) = [picture for picture in pictures(entry, host) if picture.size == (64, 64)]
    spec = importlib.util.spec_from_file_location("shapes_data", ROOT / "demo" / "shapes_data.py")
    assert spec and spec.loader
    spec.loader.exec_module(data := importlib.util.module_from_spec(spec))
    verdict = judge(picture, data.COLOURS)
    assert prompt[ids["BallastTextEncode"]]["inputs"]["prompt"] == "a red circle on a blue background, left"
    assert (verdict.colour, verdict.background, verdict.place, verdict.kind) == ("red", "blue", "left", "circle")

    again = host.run(prompt)
    assert set(host.cached(again)) == set(prompt), "nothing has changed, so nothing runs"
    prompt[ids["BallastSampler"]]["inputs"]["seed"] = 3
    changed = set(host.cached(host.run(prompt, timeout=300)))
    assert changed == {ids["BallastLoadPipeline"], ids["BallastTextEncode"]}


def test_texts_and_progress_reach_the_page(host: HostServer) -> None:
    host.events.clear()
    host.run(graph(seed=10, steps=3))
    texts = {data["node"]: data["text"] for kind, data in host.events if kind == "progress_text"}
    assert texts["sample"].startswith("transformer resident, ")
    assert texts["decode"].startswith("vae resident, ")
    steps = [
        (data["value"], data["max"]) for kind, data in host.events if kind == "progress" and data["node"] == "sample"
    ]
    assert steps[-1] == (3, 3)


def test_free_vram_runs_anywhere(host: HostServer) -> None:
    between = graph(seed=20)
    between["free"] = {**FREE, "inputs": FREE["inputs"] | {"value": ["sample", 0]}}
    between["decode"]["inputs"]["latent"] = ["free", 0]
    texts = host.run(between)["outputs"]["free"]["text"]
    assert "sim:0: 315 KB -> 0 B, freed 315 KB" in texts[0]
    # ComfyUI 0.14 lets a loader's output go with its prompt, and with it what lies in VRAM. Copies in RAM are left.
    keeps = release(find_host()) >= (0, 33)
    alone = host.run({"free": FREE})["outputs"]["free"]["text"][0]
    assert alone.startswith("On the CPU: nothing in VRAM."), "as the host is, and nothing is on the simulated card"
    assert "RAM: " not in alone or not keeps
    host.run(graph(seed=21))
    after = host.run({"again": FREE})["outputs"]["again"]["text"][0]
    freed = r"sim:0: 315 KB -> 0 B, freed 315 KB\n" if keeps else r"On the CPU: nothing in VRAM.\nRAM: \d+ KB -> 0 B, "
    assert re.match(freed, after), f"alone, it says what went: {after}"


def test_unload_buttons_let_everything_go(host: HostServer) -> None:
    host.run(graph(seed=30))
    host.free()
    report = {"class_type": "BallastVRAMReport", "inputs": {"stages": 4}}
    text = host.run({"report": report, "preview": {"class_type": "PreviewImage", "inputs": {"images": ["report", 0]}}})
    assert "lumina2/" not in text["outputs"]["report"]["text"][0], "the pipeline is gone, and its weights with it"
    assert host.cached(host.run(graph(seed=30))) == []


def test_interrupt_stops_and_the_next_prompt_works(host: HostServer) -> None:
    host.run(graph(seed=40))
    host.events.clear()
    queued = host.queue(graph(seed=41, steps=1000))
    wait_for(lambda: any(kind == "progress" and data["node"] == "sample" for kind, data in host.events))
    host.interrupt()
    entry = host.wait(queued, timeout=20)
    assert host.error(entry) == "BallastSampler: interrupted"
    report = graph(seed=42) | {
        "report": {"class_type": "BallastVRAMReport", "inputs": {"stages": 4, "after": ["encode", 0]}},
    }
    del report["preview"], report["decode"], report["sample"]
    assert host.run(report)["outputs"]["report"]["text"][0].startswith("sim:0: 0 B of weights")
    host.run(graph(seed=42))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 63, "height": 65}, "ValueError: width is 63; lumina2 takes multiples of 16 up to 256, such as 64."),
        ({"frames": 5}, "ValueError: lumina2 makes pictures, not videos: set frames to 0."),
    ],
)
def test_errors_are_one_line(given: dict[str, int], message: str, host: HostServer) -> None:
    entry = host.run(graph(**given), check=False)
    assert host.error(entry) == f"BallastSampler: {message}"
    host.run(graph())


def test_unknown_pipeline_is_refused(host: HostServer) -> None:
    prompt = graph()
    prompt["load"]["inputs"]["pipeline"] = "../../../etc"
    with pytest.raises(HostError, match="value_not_in_list"):
        host.queue(prompt)
