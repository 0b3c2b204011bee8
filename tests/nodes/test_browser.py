"""The pack in ComfyUI's page, in a headless Chromium on a real host: what its users see."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from host import HostServer, find_host, host_python
from host_graphs import native_timeline
from pictured.bands import drawn
from PIL import Image
from places import DATA, ROOT
from single_files.comfy_folders import put_templates

SCRIPT = Path(__file__).parent / "browser.mjs"
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LANGUAGES = {"en-US": "en", "zh-CN": "zh"}
PARTS = {
    "en-US": ["templates", "run", "workflows", "typed", "advanced", "nodes"],
    "zh-CN": ["run", "subgraph", "nodes"],
}

pytestmark = pytest.mark.host
each_locale = pytest.mark.parametrize("locale", LANGUAGES)


def environment() -> dict[str, str]:
    """That of the script: with CHROMIUM, and with playwright-core in NODE_PATH."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), "")
    modules = [os.environ.get("NODE_PATH", ""), str(Path.home() / "browser" / "node_modules")]
    return os.environ | {"CHROMIUM": found, "NODE_PATH": os.pathsep.join(filter(None, modules))}


def missing() -> str | None:
    """Why no page can be opened here; None if one can."""
    if find_host() is None:
        return "no ComfyUI: set COMFYUI_PATH, or put one in ~/ComfyUI"
    ran = subprocess.run([host_python(), "-c", "import torchsde, aiohttp, diffusers"], capture_output=True, timeout=120)
    if ran.returncode:
        return f"{host_python()} lacks what ComfyUI or this pack needs: set COMFYUI_PYTHON"
    if not environment()["CHROMIUM"]:
        return "no Chromium: install one, or set CHROMIUM"
    if shutil.which("node") is None:
        return "no node in PATH"
    ran = subprocess.run(["node", "-e", "require('playwright-core')"], capture_output=True, env=environment())
    return "no playwright-core: npm install playwright-core, and set NODE_PATH" if ran.returncode else None


@pytest.fixture(scope="module")
def server() -> Iterator[HostServer]:
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="ballast_page_") as base:
        (Path(base) / "input").mkdir()
        Image.new("RGB", (96, 64), "teal").save(Path(base) / "input" / "example.png")
        with HostServer(base=base, arguments=("--cpu", "--preview-method", "auto")) as running:
            yield running


@pytest.fixture(scope="module")
def pages(server: HostServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script sees, by locale. Its screenshots stay in pytest's folder."""
    return {locale: look(server, locale, tmp_path_factory.mktemp("page"), *PARTS[locale]) for locale in LANGUAGES}


def look(server: HostServer, locale: str, folder: Path, *parts: str) -> Any:
    """What the script sees."""
    command = ["node", str(SCRIPT), f"http://127.0.0.1:{server.port}", locale, str(folder), *parts]
    ran = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600, env=environment())
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


def texts(locale: str) -> dict[str, Any]:
    return json.loads((ROOT / "locales" / LANGUAGES[locale] / "nodeDefs.json").read_text("utf-8"))


def test_template_browser_lists_the_workflows(pages: dict[str, Any]) -> None:
    templates = pages["en-US"]["templates"]
    assert sorted(templates["names"]) == sorted(file.stem for file in WORKFLOWS)
    assert all(templates["pictures"]), "each has its thumbnail"


@pytest.mark.parametrize("name", [file.stem for file in WORKFLOWS])
def test_workflow_opens(name: str, pages: dict[str, Any]) -> None:
    opened = pages["en-US"]["workflows"][name]
    nodes = [node["type"] for node in json.loads((ROOT / "workflows" / f"{name}.json").read_text("utf-8"))["nodes"]]
    assert opened["nodes"] == len(nodes)
    assert opened["missing"] == opened["unlinked"] == []
    # The page marks a node whose files are not there.
    with_files = {"BallastLoadModelFiles", "BallastLoadLoRA", "BallastApplyControlNet"}
    assert opened["failed"] == [node for node in nodes if node in with_files]
    # It asks for the models that a template lists, and for nothing else.
    assert opened["said"] == "" or "models" in json.dumps(opened["said"]).lower() and "BallastLoadModelFiles" in nodes


def test_demo_runs_and_its_picture_appears(pages: dict[str, Any]) -> None:
    ran = pages["en-US"]["run"]
    assert ran["status"] == "success"
    shown = {picture["type"]: picture for picture in ran["pictures"]}
    assert shown["SaveImage"]["sizes"] == [[64, 64]]
    assert shown["SaveImage"]["colours"][0] > 8, "more than one surface"
    assert shown["PreviewImage"]["sizes"] == [[900, 675]]


def test_a_budget_is_what_is_typed(pages: dict[str, Any]) -> None:
    typed = pages["en-US"]["typed"]
    assert set(typed) == {"BallastLoadPipeline.vram_gb", "BallastLoadPipeline.ram_gb", "BallastVramBudget.vram_gb"}
    assert all(values == [7.25, 0.004] for values in typed.values()), typed


def test_the_old_page_shows_advanced_inputs_by_the_menu_and_where_they_were_changed(pages: dict[str, Any]) -> None:
    seen = pages["en-US"]["advanced"]
    schemas = json.loads((DATA / "node_schemas.json").read_text("utf-8"))
    for kind in ("BallastLoadPipeline", "BallastSampler"):
        given = {name: spec for group in schemas[kind]["input"].values() for name, spec in group.items()}
        hidden = {name for name, spec in given.items() if len(spec) > 1 and spec[1].get("advanced")}
        for state, all_of_them in (("fresh", False), ("toggled", True), ("saved", False)):
            shown = set(seen[state][kind]["widgets"])
            assert (hidden <= shown) if all_of_them else not hidden & shown, (state, kind)
            assert seen[state][kind]["spare"] == 0, (state, kind)
        assert hidden and {"vram_gb", "seed"} & set(seen["fresh"][kind]["widgets"])
    changed = {kind: seen["changed"][kind]["widgets"] for kind in seen["changed"]}
    assert "frames" in changed["BallastSampler"] and "llama" not in changed["BallastLoadPipeline"]


@each_locale
def test_a_template_can_be_read_on_a_laptop_before_and_after_its_run(locale: str, pages: dict[str, Any]) -> None:
    ran = pages[locale]["run"]
    assert ran["zoom"] >= 0.6
    assert ran["overlaps"] == []


def test_a_chinese_page_is_chinese(pages: dict[str, Any]) -> None:
    for locale, chinese in (("en-US", False), ("zh-CN", True)):
        ran = pages[locale]["run"]
        assert {"BallastSampler", "BallastVAEDecode", "BallastFreeVRAM", "BallastVRAMReport"} <= ran["texts"].keys()
        for text in (*ran["texts"].values(), ran["note"], ran["error"]):
            assert bool(re.search(r"[\u4e00-\u9fff]", text)) == chinese, text


@each_locale
def test_a_saved_graph_is_as_high_after_the_next_run(locale: str, pages: dict[str, Any]) -> None:
    first, again = pages[locale]["run"]["heights"]
    assert again == first


def test_nodes_of_a_closed_subgraph_say_what_they_did_on_it_and_once_it_is_open(pages: dict[str, Any]) -> None:
    """In the page's language; the page itself draws nothing in a graph that it does not show."""
    seen = pages["zh-CN"]["subgraph"]
    for told in (*seen["done"].values(), *seen["failed"].values(), *seen["closed"].values()):
        assert re.search(r"[\u4e00-\u9fff]", told), told
    assert {"BallastTextEncode", "BallastSampler", "BallastFreeVRAM"} <= seen["done"].keys()
    assert "0.123" in seen["failed"]["BallastSampler"]
    names = [
        texts("zh-CN")[kind]["display_name"] for kind in ("BallastTextEncode", "BallastSampler", "BallastFreeVRAM")
    ]
    assert all(f"{name}: " in seen["closed"]["done"] for name in names), seen["closed"]
    assert "0.123" in seen["closed"]["failed"] and "0.123" not in seen["closed"]["done"]


@each_locale
def test_names_are_those_of_the_language(locale: str, pages: dict[str, Any]) -> None:
    seen, wanted = pages[locale]["nodes"], texts(locale)
    assert seen.keys() == wanted.keys()
    for node_id, text in wanted.items():
        node = seen[node_id]
        assert node["title"] == text["display_name"]
        assert node["description"] == text["description"]
        assert node["outputs"] == [slot["name"] for slot in text["outputs"].values()]
        for slot, entry in text["inputs"].items():
            assert node["inputs"][slot] == entry["name"], (node_id, slot)
            assert node["widgets"].get(slot, entry["name"]) == entry["name"], (node_id, slot)


@each_locale
def test_help_panel_shows_the_page_of_the_language(locale: str, pages: dict[str, Any]) -> None:
    for node_id, text in texts(locale).items():
        panel = pages[locale]["nodes"][node_id]["help"]
        assert panel.startswith(text["display_name"])
        names = [slot["name"] for group in ("inputs", "outputs") for slot in text[group].values()]
        assert all(re.search(rf"^\s*{re.escape(name)}(\s|$)", panel, re.MULTILINE) for name in names), node_id


@pytest.mark.long
def test_templates_can_be_read_on_a_laptop_as_they_open_and_after_a_run(
    tiny_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All of them, on tiny models and with previews: nothing overlaps, and no text is cut."""
    if reason := missing():
        pytest.skip(reason)
    base = tmp_path_factory.mktemp("comfyui")
    put_templates(base, tiny_folders)
    with HostServer(base=base, arguments=("--cpu", "--preview-method", "auto")) as server:
        seen = look(server, "en-US", tmp_path_factory.mktemp("page"), "layout")["layout"]
    assert seen.keys() == {file.stem for file in WORKFLOWS}
    for file in WORKFLOWS:
        opened, ran = seen[file.stem]["opened"], seen[file.stem]["ran"]
        assert ran["status"] == "success", file.stem
        assert ran["pictures"] or "video" in file.stem, file.stem
        for shown in (opened, ran):
            assert shown["zoom"] >= 0.6, file.stem
            assert shown["overlaps"] == [], file.stem
        assert ran["cut"] and all(hidden <= 0 for hidden, _ in ran["cut"]), (file.stem, ran["cut"])


def test_timeline_of_a_purely_native_graph_is_shown(tmp_path: Path) -> None:
    """ComfyUI's nodes, whose models are on a card, and VRAM Report: three models as bands in the page."""
    if reason := missing():
        pytest.skip(reason)
    graph = {str(i): each for i, each in enumerate(native_timeline().values())}
    ids = dict(zip(native_timeline(), graph, strict=True))
    for each in graph.values():
        links = {name: value for name, value in each["inputs"].items() if isinstance(value, list)}
        each["inputs"] |= {name: [ids[value[0]], value[1]] for name, value in links.items()}
    (tmp_path / "graph.json").write_text(json.dumps(graph), "utf-8")
    with HostServer(sim="16MB") as server:
        server.run(graph)  # whose first calls of everything take long
        seen = look(server, "en-US", tmp_path, "graph")["graph"]
    ((hidden, shown_height),) = seen["cut"]
    assert hidden <= 0 and shown_height > 100, "the whole of the report, in a node as the page makes it"
    said = seen["texts"]["BallastVRAMReport"]
    assert re.match(r"sim:0: \S+ KB of ComfyUI's models, ", said) and " of weights" not in said
    assert seen["status"] == "success" and seen["overlaps"] == []
    (shown,) = seen["shown"]
    picture = Image.open(BytesIO(base64.b64decode(shown.split(",")[1]))).convert("RGB")
    picture.save(tmp_path / "shown.png")
    assert picture.size == (900, 675)
    assert all(count > 50 for count in drawn(picture).values()), drawn(picture)
    assert all(
        f"{kind}: " in seen["texts"]["BallastVRAMReport"] for kind in ("CLIPTextEncode", "KSampler", "VAEDecode")
    )
    assert seen["laptop"] >= 0.35
