"""Two ComfyUI servers that share the pack, the models and the caches on disk, and run the same graphs side by side."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ballast.pipelines.encoding.embedding_cache import EmbeddingCache
from host import HostServer, missing
from PIL import Image

pytestmark = [pytest.mark.host, pytest.mark.long]

PROMPTS = ("a red boat", "a blue house", "two green hills")
TEXT = "BallastTextEncode"


@pytest.fixture(scope="module")
def shared(tiny_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and, later, caches, for servers with folders of their own for all else."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("shared")
    (folder / "models" / "diffusers").mkdir(parents=True)
    (folder / "models" / "diffusers" / "lumina2").symlink_to(tiny_folders("lumina2"), target_is_directory=True)
    return folder


def started(shared: Path, base: Path) -> HostServer:
    if not base.exists():
        (base / "user").mkdir(parents=True)
        (shared / "cache" / "ballast").mkdir(parents=True, exist_ok=True)
        (base / "models").symlink_to(shared / "models", target_is_directory=True)
        (base / "user" / "ballast").symlink_to(shared / "cache" / "ballast", target_is_directory=True)
    return HostServer(base=base, environment={"XDG_CACHE_HOME": str(shared / "cache")}).__enter__()


@pytest.fixture
def pair(shared: Path, tmp_path: Path) -> Iterator[list[HostServer]]:
    """Two servers, and caches that are empty."""
    for path in [path for path in (shared / "cache").rglob("*") if path.is_file()]:
        path.unlink()
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        servers = list(pool.map(started, [shared] * 2, [tmp_path / "one", tmp_path / "other"]))
        for server in servers:
            stack.callback(server.close)
        yield servers


def graph(prompt: str, seed: int = 0, steps: int = 3) -> dict[str, Any]:
    loader = {"pipeline": "lumina2", "vram_gb": 0, "dtype": "auto", "keep_loaded": True, "device": "auto"}
    sampling = {"width": 48, "height": 32, "guidance": 4, "frames": 0, "strategy": "auto", "seed": seed, "steps": steps}

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": inputs}

    return {
        "load": node("BallastLoadPipeline", **loader),
        "encode": node(TEXT, pipeline=["load", 0], prompt=prompt, negative_prompt=""),
        "plan": node(
            "BallastVRAMPlan",
            pipeline=["load", 0],
            vram_gb="8",
            width=48,
            height=32,
            steps=3,
            guidance=4.0,
            conditioning=["encode", 0],
        ),
        "sample": node("BallastSampler", pipeline=["load", 0], conditioning=["encode", 0], **sampling),
        "decode": node("BallastVAEDecode", pipeline=["load", 0], latent=["sample", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="made"),
    }


def picture(server: HostServer, entry: dict[str, Any]) -> bytes:
    (image,) = entry["outputs"]["save"]["images"]
    return Image.open(server.base / "output" / image["filename"]).convert("RGB").tobytes()


def made(server: HostServer, prompts: Any = PROMPTS) -> list[bytes]:
    queued = [server.queue(graph(prompt)) for prompt in prompts]
    entries = [server.wait(each, timeout=300) for each in queued]
    assert all(entry["status"]["status_str"] == "success" for entry in entries), [server.error(e) for e in entries]
    return [picture(server, entry) for entry in entries]


def side_by_side(servers: list[HostServer]) -> list[list[bytes]]:
    """The pictures of each server, all asked for at once."""
    ready = threading.Barrier(len(servers))

    def run(server: HostServer) -> list[bytes]:
        ready.wait()
        return made(server)

    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(run, servers))


def kept(shared: Path) -> dict[str, str]:
    """What is in the folder of caches: path and ending."""
    cache = shared / "cache"
    return {str(path.relative_to(cache)): path.suffix for path in cache.rglob("*") if path.is_file()}


def assert_in_order(shared: Path, embeddings: int) -> None:
    folder = shared / "cache" / "ballast" / "embeddings"
    entries = sorted(folder.glob("*.safetensors"))
    assert len(entries) == embeddings, "one for each prompt, none twice"
    cache = EmbeddingCache(folder)
    for entry in entries:
        found = cache.get(entry.stem)
        assert found is not None and all(tensor.isfinite().all() for tensor in found.tensors.values())
    assert len(sorted(folder.glob("*.safetensors"))) == embeddings, "and none was damaged"


def complaints(server: HostServer) -> list[str]:
    """What the pack, or Python, warns of in a server's log."""
    return [line for line in server.log.splitlines() if "Ballast:" in line and "cache" in line or "Traceback" in line]


def test_the_same_graph_at_the_same_time(shared: Path, pair: list[HostServer]) -> None:
    one, other = side_by_side(pair)
    assert one == other and len(set(one)) == len(PROMPTS)
    assert_in_order(shared, len(PROMPTS))
    assert ".ballast-part" not in kept(shared).values()
    assert any(name.startswith("ballast/embeddings/forecasts/") for name in kept(shared))
    assert all(complaints(server) == [] for server in pair)
    before = kept(shared)
    for server in pair:  # what either has written serves both
        server.free()
        server.events.clear()
        assert made(server) == one
        said = [data["text"] for kind, data in server.events if kind == "progress_text"]
        assert sum("no encoder loaded" in text for text in said) == len(PROMPTS), said
    assert kept(shared) == before, "and nothing is written twice"


@pytest.mark.parametrize("moment", [TEXT, "BallastSampler"])
def test_one_that_is_killed_leaves_the_other_unharmed(
    moment: str, shared: Path, pair: list[HostServer], tmp_path: Path
) -> None:
    victim, other = pair
    nodes = {"encode": TEXT, "sample": "BallastSampler"}
    queued = [other.queue(graph(prompt)) for prompt in PROMPTS]
    for prompt in PROMPTS:
        victim.queue(graph(prompt, steps=50 if moment == "BallastSampler" else 3))

    def reached() -> bool:
        at = [data["node"] for kind, data in victim.events if kind == "executing" and data and data.get("node")]
        return any(nodes.get(node) == moment for node in at)

    deadline = time.monotonic() + 120
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert reached() and victim.process is not None
    os.killpg(victim.process.pid, signal.SIGKILL)
    assert victim.process.wait(30) == -signal.SIGKILL

    entries = [other.wait(each, timeout=300) for each in queued]
    assert [entry["status"]["status_str"] for entry in entries] == ["success"] * len(PROMPTS)
    pictures = [picture(other, entry) for entry in entries]
    assert_in_order(shared, len(PROMPTS))
    assert complaints(other) == []

    # As it would have left the half of a file, long ago.
    folder = shared / "cache" / "ballast" / "embeddings"
    half = folder / "left.ballast-part"
    half.write_bytes(sorted(folder.glob("*.safetensors"))[0].read_bytes()[:100])
    os.utime(half, (time.time() - 7200,) * 2)
    again = started(shared, tmp_path / "one")
    try:
        assert made(again) == pictures
        assert made(again, ["a new one"]) == made(other, ["a new one"])
        assert complaints(again) == []
    finally:
        again.close()
    assert_in_order(shared, len(PROMPTS) + 1)
    assert not half.exists()
