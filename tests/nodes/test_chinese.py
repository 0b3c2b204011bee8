"""What the page translates by itself: texts in nodes, errors, and the templates' notes, by the table in web/zh.json."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.free import FreeVram
from ballast.nodes.load import LoadPipeline
from ballast.nodes.native.model_plan import ModelPlan
from ballast.nodes.native.model_weights import Weights
from ballast.nodes.plan import VramPlan
from ballast.nodes.report import VramReport
from ballast.nodes.sample import Sampler
from ballast.nodes.shared.folders import DEMO
from ballast.nodes.shared.running import _IN_WIDGETS
from ballast.pipelines.options import OWNERS
from host import page, run_node
from places import ROOT
from test_pages import CHINESE, printed, texts_in

TABLE = json.loads((ROOT / "web" / "zh.json").read_text("utf-8"))
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
HOLE = "\u2026"
# Functions outside of the nodes whose wordings nodes show.
SPEAKERS = {
    "memory/planning/planner.py": {"taking_turns", "_reason", "label"},
    "memory/planning/runplan.py": {"brief", "batch_words"},
}
# Where texts of two places meet in one sentence.
JOINTS = r"(?= from disk| \(planned| \(and| NaN| by default|is cut: |prompt is cut|reads? )"
# Parts that nodes do not show: in tables of plans, in the log, and in what another error puts in other words.
ELSEWHERE = {
    "8, 12, 24 in vram_gb",
    "_gb to",
    "the weights are not all on the device, where stripes need them",
    "this VAE fits neither whole nor in stripes",
}
# What stays: names of devices, units and models, and units of measure.
NAMES = r"sim|cpu|text_encoder|transformer|vae|Shapes demo|shapes|KB|MB|GB|ms|us|min|Ballast"

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node in PATH")


def translated(texts: list[str]) -> list[str]:
    script = (
        "import { translator } from '" + (ROOT / "web" / "translate.js").as_uri() + "'\n"
        "let given = ''\nfor await (const part of process.stdin) given += part\n"
        "const [pairs, texts] = JSON.parse(given)\nconsole.log(JSON.stringify(texts.map(translator(pairs))))"
    )
    command = ["node", "--input-type=module", "--no-warnings", "-e", script]
    given = json.dumps([TABLE["messages"], texts])
    ran = subprocess.run(command, input=given, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_every_known_sentence_is_printed() -> None:
    """A text that changes changes here, too."""
    sources = [*printed(), (ROOT / "demo" / "shapes" / "model_index.json").read_text("utf-8")]
    for known, _ in TABLE["messages"]:
        # What is put together when it is printed may come from different places.
        parts = [part for part in re.split(rf"{HOLE}|(?<=\.) |{JOINTS}", known) if part.strip(" ,:;.")]
        assert all(any(part.strip(" ,:.") in source for source in sources) for part in parts), known


def spoken() -> Iterator[str]:
    """The wordings of nodes, and of plans as nodes show them: texts in functions, but for schemas and the log."""
    for path in [ROOT / name for name in SPEAKERS] + sorted((ROOT / "nodes").rglob("*.py")):
        speakers = SPEAKERS.get(path.relative_to(ROOT).as_posix())
        for node in ast.walk(ast.parse(path.read_text("ascii"))):
            if not isinstance(node, ast.FunctionDef) or (speakers and node.name not in speakers):
                continue
            if not any(isinstance(inner, ast.keyword) and inner.arg == "tooltip" for inner in ast.walk(node)):
                inner = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
                unsaid = {ast.get_docstring(each, clean=False) for each in inner}
                yield from (text for text in texts_in(node) if text not in unsaid and not text.startswith("Ballast: "))


def test_every_wording_of_a_node_is_known() -> None:
    """As a part of a known sentence: what is filled in may be any."""
    known = [sentence for sentence, _ in TABLE["messages"]]
    filled = [re.compile(".+".join(map(re.escape, sentence.strip(".").split(HOLE)))) for sentence in known]
    unknown = set()
    for text in spoken():
        for part in (part.strip(" ,:.()") for part in re.split(rf"{HOLE}|\n|; |(?<=\.) ", text)):
            told = any(part in sentence for sentence in known) or any(each.fullmatch(part) for each in filled)
            if re.search("[A-Za-z]{2}.* .*[A-Za-z]{2}", part) and not told:
                unknown.add(part)
    assert unknown == ELSEWHERE


def test_every_sentence_has_its_translation() -> None:
    for known, said in TABLE["messages"]:
        holes = {int(number) for number in re.findall(r"\$(\d)", said)}
        assert holes <= set(range(1, known.count(HOLE) + 1)), known
        assert said != known and not said.isascii(), known
    assert len({known for known, _ in TABLE["messages"]}) == len(TABLE["messages"])


@pytest.mark.parametrize("file", WORKFLOWS, ids=[file.stem for file in WORKFLOWS])
def test_notes_and_titles_of_a_template_are_known(file: Path) -> None:
    known = dict(TABLE["graphs"])
    for node in json.loads(file.read_text("utf-8"))["nodes"]:
        shown = [node["title"]] if "title" in node else []
        for text in shown + (node["widgets_values"] if node["type"] == "MarkdownNote" else []):
            assert text in known, text[:60]
            assert CHINESE.search(known[text])
            assert len(re.findall(r"^- ", text, re.M)) == len(re.findall(r"^- ", known[text], re.M))


@needs_node
def test_what_nodes_ask_for_in_place_of_the_library_is_chinese() -> None:
    """Each sentence of it: a translation may leave one of two as it was."""
    subject = {"that does": "Flux takes no mask: diffusers has no pipeline of its parts "}
    asked = [*_IN_WIDGETS.values(), "true_cfg is for " + OWNERS["true_cfg"] + ", not for Flux: set it to 0."]
    texts = [text if text[0].isupper() else subject.get(text[:9], "Flux ") + text for text in asked]
    for text, told in zip(texts, translated(texts), strict=True):
        assert not re.search(r"[a-z]+ [a-z]+ [a-z]+", told), (text, told)


@needs_node
def test_what_nodes_say_is_chinese(sim: ModuleType) -> None:
    sim.enable(total="64MB")
    with page() as shown:
        for vram_gb in (0.0, 0.004):
            reference = run_node(LoadPipeline, pipeline=DEMO, device="sim", vram_gb=vram_gb).result[0]
            given = {"prompt": f"a red circle, {vram_gb}", "negative_prompt": ""}
            run_node(VramPlan, pipeline=reference)
            for _ in range(2):
                conditioning = run_node(TextEncode, pipeline=reference, **given).result[0]
            latent = run_node(Sampler, pipeline=reference, conditioning=conditioning, steps=3).result[0]
            run_node(FreeVram, value=latent)
            run_node(VaeDecode, pipeline=reference, latent=latent)
            run_node(VramReport)
            run_node(VramReport, prompt_id="another")
        run_node(FreeVram)
    said = [text for _, text in shown.texts]
    assert len(set(said)) > 12
    for text, other in zip(said, translated(said), strict=True):
        rest = re.sub(NAMES, "", other)
        assert CHINESE.search(other) and not re.search("[A-Za-z]{2}", rest), (text, other)
        figures = [sorted(re.findall(r"\d+(?:\.\d+)?", words)) for words in (text, other)]
        assert figures[0] == figures[1], (text, other)


@needs_node
def test_what_a_plan_of_a_model_says_is_chinese() -> None:
    weights = Weights((("float8_e4m3fn", 11 * 2**30), ("GGUF Q4_K", 2**20)), 304, 2**28)
    plan = ModelPlan(
        "Flux, 1024 x 1024; 5 latent frames; batch 2", torch.device("cuda:0"), weights, 2**30, 2**29, 0, ()
    )
    unknown = replace(plan, weights=replace(weights, patched=0), dry_run_bytes=None)
    texts = [plan.title, *plan.facts(), *unknown.facts(), *map(plan.verdict, (2**34, 12 * 2**30, 2**33, 2**28))]
    for text, told in zip(texts, translated([text if text[-1] == "." else f"{text}." for text in texts]), strict=True):
        assert CHINESE.search(told) and not re.search(r"[a-z]+ [a-z]+ [a-z]+", told), (text, told)
        assert not re.search(r"ComfyUI expects|weights|latent|batch|dry run", told), (text, told)


@needs_node
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "pipeline 'x' is not in models/diffusers any more. Choose another, or put it back.",
            "\u7ba1\u7ebf 'x' \u5df2\u4e0d\u5728 models/diffusers \u4e2d\u3002\u8bf7\u53e6\u9009\u4e00\u4e2a\uff0c"
            "\u6216\u628a\u5b83\u653e\u56de\u53bb\u3002",
        ),
        (
            "failed: pipeline 'x' is not in models/diffusers any more. Choose another, or put it back.",
            "\u5931\u8d25\uff1a\u7ba1\u7ebf 'x' \u5df2\u4e0d\u5728 models/diffusers \u4e2d\u3002"
            "\u8bf7\u53e6\u9009\u4e00\u4e2a\uff0c\u6216\u628a\u5b83\u653e\u56de\u53bb\u3002",
        ),
        ("a sentence that nobody knows. And another one.", "a sentence that nobody knows. And another one."),
        (
            "a sentence that nobody knows. Download it again.",
            "a sentence that nobody knows. \u8bf7\u91cd\u65b0\u4e0b\u8f7d\u3002",
        ),
    ],
)
def test_errors_are_translated_as_far_as_they_are_known(error: str, said: str) -> None:
    assert translated([error]) == [said]
