"""What the page shows beside the nodes: names and tooltips in English and Chinese, help pages, and quoted messages."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
from typing import Any

import pytest
from ballast.nodes import BallastExtension
from places import ROOT

LOCALES, DOCS = ROOT / "locales", ROOT / "web" / "docs"
NODES = {node.GET_SCHEMA().node_id: node for node in asyncio.run(BallastExtension().get_node_list())}
LANGUAGES = ("en", "zh")
# The page would show a `display_name` of an input in every language, so these have none.
ENGLISH_NAMES = {
    ("BallastTextEncode", "pipeline"): "pipeline or clip",
    ("BallastVAEDecode", "pipeline"): "pipeline or vae",
    ("BallastVRAMPlan", "pipeline"): "pipeline or model",
    ("BallastFreeVRAM", "host_models"): "ComfyUI's models",
}
# Values stay as saved graphs hold them, and diffusers names them; the page shows these instead.
SHOWN = {("attention", f"_{name}"): name for name in ("flash_3", "native_cudnn", "native_efficient")}
CHINESE = re.compile(r"[\u4e00-\u9fff]")
SOURCES = [path for folder in ("memory", "nodes", "pipelines") for path in sorted((ROOT / folder).rglob("*.py"))]

each_node = pytest.mark.parametrize("node_id", NODES)
each_language = pytest.mark.parametrize("language", LANGUAGES)


def english() -> dict[str, Any]:
    """The English texts, which are those of the schemas."""
    texts: dict[str, Any] = {}
    for node_id, node in NODES.items():
        schema = node.GET_SCHEMA()
        texts[node_id] = {"display_name": schema.display_name, "description": schema.description}
        texts[node_id]["inputs"] = {
            slot.id: {
                "name": ENGLISH_NAMES.get((node_id, slot.id)) or slot.display_name or slot.id,
                "tooltip": slot.tooltip,
                **shown_options(slot),
            }
            for slot in schema.inputs
        }
        texts[node_id]["outputs"] = {
            str(index): {"name": slot.display_name or slot.id, "tooltip": slot.tooltip}
            for index, slot in enumerate(schema.outputs)
        }
    return texts


def shown_options(slot: Any) -> dict[str, Any]:
    """What the page shows for values that are no words."""
    shown = {value: SHOWN[slot.id, value] for value in getattr(slot, "options", ()) if (slot.id, value) in SHOWN}
    assert shown or not any(str(value).startswith("_") for value in getattr(slot, "options", ())), slot.id
    return {"options": shown} if shown else {}


def locale(language: str) -> dict[str, Any]:
    return json.loads((LOCALES / language / "nodeDefs.json").read_text("utf-8"))


def help_page(node_id: str, language: str) -> str:
    """The page asks for NODE/LANGUAGE.md, then for NODE.md: so English is what every other language falls back to."""
    path = DOCS / f"{node_id}.md" if language == "en" else DOCS / node_id / f"{language}.md"
    return path.read_text("utf-8")


def keys(tree: Any) -> Any:
    return {name: keys(value) for name, value in tree.items()} if isinstance(tree, dict) else None


def leaves(tree: Any) -> list[str]:
    return [leaf for value in tree.values() for leaf in leaves(value)] if isinstance(tree, dict) else [tree]


# Names and tooltips


def test_english_is_what_the_schemas_say() -> None:
    """UPDATE_LOCALES=1 rewrites it."""
    file = LOCALES / "en" / "nodeDefs.json"
    text = json.dumps(english(), indent=2) + "\n"
    if os.environ.get("UPDATE_LOCALES"):
        file.write_text(text, "ascii")
    assert json.loads(file.read_text("ascii")) == english()


@each_language
def test_every_text_is_there_and_no_other(language: str) -> None:
    texts = locale(language)
    assert keys(texts) == keys(english())
    for text in leaves(texts):
        assert text and text == text.strip()
        assert not re.search(r"[@{}|]", text), f"the page would read {text!r} as a formula"


@each_node
def test_chinese_is_chinese(node_id: str) -> None:
    texts = locale("zh")[node_id]
    said = [
        texts["description"],
        *(slot["tooltip"] for group in ("inputs", "outputs") for slot in texts[group].values()),
    ]
    for text in said:
        assert CHINESE.search(text) and text.endswith("\u3002"), text
    names = [slot["name"] for slot in texts["inputs"].values()]
    assert len(set(names)) == len(names)


def test_inputs_have_no_name_that_hides_the_translated_one() -> None:
    named = {
        (node_id, slot.id) for node_id, node in NODES.items() for slot in node.GET_SCHEMA().inputs if slot.display_name
    }
    assert not named, "give it in ENGLISH_NAMES"


def test_languages_are_those_that_are_tested() -> None:
    assert sorted(path.relative_to(LOCALES).as_posix() for path in LOCALES.rglob("*.json")) == [
        f"{language}/nodeDefs.json" for language in LANGUAGES
    ]


# Help pages


@each_language
@each_node
def test_help_page_names_every_input_and_output(node_id: str, language: str) -> None:
    text, texts = help_page(node_id, language), locale(language)[node_id]
    assert text.startswith(f"# {texts['display_name']}\n")
    inputs = [(slot, entry["name"]) for slot, entry in texts["inputs"].items()]
    outputs = [
        (english()[node_id]["outputs"][index]["name"], entry["name"]) for index, entry in texts["outputs"].items()
    ]
    for slot, name in (*inputs, *outputs):
        row = f"| {name} |" if language == "en" else f"| {name} `{slot}` |"
        assert f"\n{row}" in text, row
    rows = re.findall(r"^\| .* \|$", text.split("\n## ")[0], re.MULTILINE)
    assert len(rows) >= len(inputs) + len(outputs) + 4, "two tables, each with a head"


@each_node
def test_help_page_is_short_and_the_same_in_both_languages(node_id: str) -> None:
    texts = [help_page(node_id, language) for language in LANGUAGES]
    assert all(len(text) < 6000 for text in texts)
    for pattern in (r"^#+ ", r"^\| ", r"^(?:- |\d\. )"):
        assert len({len(re.findall(pattern, text, re.MULTILINE)) for text in texts}) == 1, pattern
    assert quoted(texts[0]) == quoted(texts[1])


def test_there_is_no_help_page_of_another_node() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.is_file()}
    assert pages == {f"{node_id}.md" for node_id in NODES} | {f"{node_id}/zh.md" for node_id in NODES}


# Messages


def quoted(text: str) -> list[str]:
    """The messages in tables: what stands in backticks in the first column, and is more than one word."""
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell) if " " in message]


def texts_in(tree: ast.AST) -> list[str]:
    """All texts of a piece of code, with an ellipsis for what is filled in."""
    found = []
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {part for part in node.values if isinstance(part, ast.Constant)}
            found.append("".join(v.value if isinstance(v, ast.Constant) else "\u2026" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            found.append(re.sub(r"%s|\{\w*\}", "\u2026", node.value))
    return found


def printed() -> list[str]:
    """All texts of the pack."""
    return [text for path in SOURCES for text in texts_in(ast.parse(path.read_text("ascii")))]


def is_printed(message: str, sources: list[str]) -> bool:
    parts = [part.strip() for part in message.split("\u2026")]
    return any(in_order(parts, source) for source in sources)


def in_order(parts: list[str], text: str) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at) + len(part)
        if at < len(part):
            return False
    return True


def test_help_pages_quote_what_is_printed() -> None:
    sources = printed()
    for language in LANGUAGES:
        for message in quoted("\n".join(help_page(node_id, language) for node_id in NODES)):
            assert is_printed(message, sources), message


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_troubleshooting_quotes_what_is_printed(folder: str) -> None:
    sources = printed()
    messages = quoted((ROOT / folder / "troubleshooting.md").read_text("utf-8").replace("Ballast: ", ""))
    assert len(messages) >= 25
    for message in messages:
        assert is_printed(message, sources), message


def test_only_these_files_are_not_ascii() -> None:
    kinds = {".py", ".mjs", ".toml", ".txt", ".ini", ".json"}
    for path in (file for file in ROOT.rglob("*") if file.suffix in kinds):
        top = path.relative_to(ROOT).parts[0]
        if not top.startswith(".") and top not in ("locales", "web", "build"):
            assert path.read_bytes().isascii(), path
