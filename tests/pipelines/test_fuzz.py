"""Headers and configs changed at random: read, or refused in one line. Never a hang, a crash, or another error."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import newbie_folders
import pyramid_folders
import pytest
from ballast.bench.rss import peak_rss_bytes
from ballast.memory.weights.stored import find_weights, read_header, stored_tensors
from ballast.nodes.shared.folders import find_llamas, find_pipelines
from hidream_folders import published
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Folders = Callable[[str], Path]
WEIGHTS = "diffusion_pytorch_model.safetensors"
REFUSALS = (ValueError, TypeError, FileNotFoundError, ImportError)

NUMBERS = st.sampled_from([0, 1, -1, 2, 7, 64, 4096, 10**9, 2**31, 2**63, 10**18, 0.5, -0.0, 1e308, float("nan")])
WORDS = st.sampled_from(["", "..", "../../x", "/etc/passwd", "a\nb", "a\0b", "os", "system", "diffusers", "_private",
                         "AutoencoderKL", "auto", "silu", "F32", "F99", "I64", "x" * 5000, "\ud800"])  # fmt: skip
SIMPLE = st.one_of(NUMBERS, WORDS, st.none(), st.booleans())
VALUES = st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3))

few = settings(
    max_examples=int(os.environ.get("BALLAST_FUZZ_EXAMPLES", 60)), derandomize=True, deadline=60_000, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def places(content: Any) -> list[tuple[Any, Any]]:
    """Every container in some JSON with each of its keys."""
    if not isinstance(content, (dict, list)):
        return []
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    return [(content, key) for key in keys] + [place for key in keys for place in places(content[key])]


@st.composite
def changed(draw: st.DrawFn, content: Any) -> Any:
    """Some JSON with one to three places replaced, taken away, doubled under another name, or wrapped in depth."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        if not (where := places(content)):
            break
        holder, key = where[draw(st.integers(0, len(where) - 1))]
        match draw(st.sampled_from(["replace", "replace", "drop", "double", "deep"])):
            case "replace":
                holder[key] = draw(VALUES)
            case "drop":
                del holder[key]
            case "double" if isinstance(holder, dict):
                holder[draw(WORDS)] = copy.deepcopy(holder[key])
            case _:
                holder[key] = [[[holder[key]]]]
    return content


def survives(run: Callable[[], Any]) -> bool:
    """Whether a call ends well; else it is refused in one line."""
    try:
        run()
    except REFUSALS as error:
        said = str(error)
        assert said.strip(), repr(error)
        assert "\n" not in said, said
        assert len(said) < 2000, said
        return False
    return True


# Headers


@pytest.fixture
def weights(tiny_folders: Folders, tmp_path: Path) -> tuple[Path, dict[str, Any], bytes]:
    content = (tiny_folders("lumina2") / "vae" / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    first = dict(sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0]))[:4])
    end = max(entry["data_offsets"][1] for entry in first.values() if "data_offsets" in entry)
    return tmp_path / WEIGHTS, first, content[8 + length :][:end]


def read_all(path: Path) -> None:
    for name, at in stored_tensors([path]).items():
        assert isinstance(name, str)
        assert 0 <= at.offset <= path.stat().st_size
    read_header(path)
    find_weights(path.parent)


@few
@given(data=st.data())
def test_headers(weights: tuple[Path, dict[str, Any], bytes], data: st.DataObject) -> None:
    path, header, body = weights
    text = json.dumps(data.draw(changed(header))).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    survives(lambda: read_all(path))


@few
@given(data=st.data())
def test_headers_with_bytes_changed(weights: tuple[Path, dict[str, Any], bytes], data: st.DataObject) -> None:
    path, header, body = weights
    text = json.dumps(header).encode()
    content = bytearray(struct.pack("<Q", len(text)) + text + body)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 8 + len(text) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), 7, 100, len(content) - 1]))]))
    survives(lambda: read_all(path))


def test_unchanged_header(weights: tuple[Path, dict[str, Any], bytes]) -> None:
    path, header, body = weights
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    assert survives(lambda: read_all(path))


# Configs


def opened(folder: Path, **family: Any) -> None:
    pipe = ballast.open_pipeline(folder, device="cpu", **family)
    for unit in (*pipe.encoders, *pipe.denoisers, pipe.decoder):
        assert all(parameter.is_meta for parameter in unit.module.parameters())


@pytest.fixture(scope="module")
def folders(tiny_folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """A folder of each way of opening, to be changed, with the arguments that it is opened with."""
    root = tmp_path_factory.mktemp("fuzz")
    hidream, llama = published(tiny_folders("hidream"), root / "hidream")
    found: dict[str, tuple[Path, dict[str, Any]]] = {
        "lumina2": (shutil.copytree(tiny_folders("lumina2"), root / "lumina2"), {}),
        "hidream": (hidream, {"llama": llama}),
        "newbie": (newbie_folders.official(root / "newbie"), {}),
        "pyramid": (pyramid_folders.save("flux", root / "pyramid"), {}),
    }
    for folder, family in found.values():
        opened(folder, **family)
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", ["lumina2", "hidream", "newbie", "pyramid"])
def test_configs(folders: dict[str, tuple[Path, dict[str, Any]]], family: str) -> None:
    folder, arguments = folders[family]
    configs = sorted([*folder.glob("*.json"), *folder.glob("*/config.json"), *folder.glob("*/*_config.json")])

    @settings(few, max_examples=few.max_examples // (6 if os.environ.get("BALLAST_SOAK") else 10))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(configs))
        content = path.read_text("utf-8")
        try:
            path.write_text(json.dumps(data.draw(changed(json.loads(content)))), "utf-8")
            survives(lambda: opened(folder, **arguments))
        finally:
            path.write_text(content, "utf-8")

    before = peak_rss_bytes()
    check()
    assert peak_rss_bytes() - before < 1e9
    opened(folder, **arguments)


@few
@given(content=changed({"metadata": {"total_size": 8}, "weight_map": {"a": WEIGHTS, "b": "other.safetensors"}}))
def test_indexes(tiny_folders: Folders, tmp_path: Path, content: Any) -> None:
    shutil.copy(tiny_folders("lumina2") / "vae" / WEIGHTS, tmp_path / WEIGHTS)
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps(content), "utf-8")
    found: list[Path] = []
    if survives(lambda: found.extend(find_weights(tmp_path)[0])):
        assert all(path.parent == tmp_path and path.is_file() for path in found)
    survives(lambda: (find_pipelines(), find_llamas()))
