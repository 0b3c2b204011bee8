"""A real ComfyUI over HTTP whose own device is the simulated card: its models and ours share one memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from host import HostServer, missing
from host_graphs import (
    NEGATIVE,
    PROMPT,
    after,
    encoding,
    loaded,
    native_run,
    native_timeline,
    node,
    our_run,
    seen,
    summary,
)
from pictured.bands import MODELS, drawn
from PIL import Image

pytestmark = pytest.mark.host

CARD = "12MB"  # less than the host's CLIP, its UNet and our transformer take together
OURS, UNET, CLIP = 3949536, 4318288, 6543364  # bytes of their weights


@pytest.fixture(scope="module")
def base(tiny_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("comfyui")
    models = root / "models" / "diffusers"
    models.mkdir(parents=True)
    (models / "lumina2").symlink_to(tiny_folders("lumina2"), target_is_directory=True)
    return root


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[HostServer]:
    if reason := missing():
        pytest.skip(reason)
    with HostServer(base=base, sim=CARD) as server:
        yield server


@pytest.fixture
def host(server: HostServer) -> HostServer:
    """The server, with nothing on the card and nothing in the host's cache of outputs."""
    server.free()
    assert server.device()["allocated_bytes"] == 0
    server.events.clear()
    return server


def card_at(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """What the card held when that node ran."""
    return entry["outputs"][name]["device"][0]


def texts(server: HostServer) -> dict[str, str]:
    return {data["node"]: data["text"] for kind, data in server.events if kind == "progress_text"}


def blocked(server: HostServer) -> list[str]:
    found = [data for kind, data in server.events if kind == "execution_error"]
    return [f"{data['node_id']}: {data['exception_message']}" for data in found]


def test_host_runs_on_the_simulated_card(host: HostServer) -> None:
    card = host.device()
    assert card["device"] == "sim:0" and card["total_bytes"] == 12 * 2**20 and card["loaded"] == {}
    entry = host.run({"clip": loaded("Clip"), "text": node("CLIPTextEncode", clip=["clip", 0], text=PROMPT)} | {
        "seen": seen("text", 0)
    })  # fmt: skip
    assert card_at(entry, "seen")["loaded"]["SD1ClipModel"] > 6_000_000, "which the host leaves there"


@pytest.mark.parametrize("skip", [False, True], ids=["whole", "clip skip"])
def test_encoding_is_that_of_the_host(skip: bool, host: HostServer) -> None:
    last = node("CLIPSetLastLayer", clip=["clip", 0], stop_at_clip_layer=-2)
    source = "last" if skip else "clip"
    models = {"clip": loaded("Clip", seed=1)} | ({"last": last} if skip else {})
    ours = host.run(models | {"encode": encoding(source), "seen+": seen("encode", 1), "seen-": seen("encode", 2)})
    assert "SD1ClipModel 6.24 MB in VRAM, now gone" in texts(host)["encode"]
    assert card_at(ours, "seen+")["allocated_bytes"] == 0 and not blocked(host)
    theirs = models | {
        "+": node("CLIPTextEncode", clip=[source, 0], text=PROMPT),
        "-": node("CLIPTextEncode", clip=[source, 0], text=NEGATIVE),
        "seen+": seen("+", 0),
        "seen-": seen("-", 0),
    }
    entry = host.run(theirs)
    for sign in ("seen+", "seen-"):
        assert summary(ours, sign) == summary(entry, sign)


def test_prompt_of_before_loads_nothing(host: HostServer) -> None:
    graph = {"clip": loaded("Clip", seed=2), "encode": encoding(), "seen": seen("encode", 1)}
    other = {**graph, "encode": node("BallastTextEncode", pipeline=["clip", 0], prompt="a car", negative_prompt="")}
    first, _ = host.run(graph), host.run(other)
    moved = host.device()["h2d_bytes"]
    again = host.run(graph)
    assert "clip" in host.cached(again) and "encode" not in host.cached(again)
    assert texts(host)["encode"] == "from the cache, no encoder loaded"
    assert host.device()["h2d_bytes"] == moved
    assert summary(again, "seen") == summary(first, "seen")


def test_outputs_that_do_not_apply_stop_only_what_uses_them(host: HostServer) -> None:
    clip = {"clip": loaded("Clip", seed=3), "encode": encoding()}
    entry = host.run(clip | {"right": seen("encode", 1), "wrong": seen("encode", 0)})
    assert list(entry["outputs"]) == ["right"]
    assert blocked(host) == [
        "wrong: Execution Blocked: conditioning is for Ballast's loaders, but a CLIP is connected. Use positive "
        "and negative, or connect a Ballast pipeline."
    ]
    host.events.clear()
    ours = our_run()
    entry = host.run(ours | {"wrong": seen("our encode", 2)})
    assert list(entry["outputs"]) == ["seen sample"]
    assert [message.split(",")[0] for message in blocked(host)] == [
        "wrong: Execution Blocked: positive and negative are for ComfyUI's own CLIP"
    ]


@pytest.mark.parametrize(("kind", "shape"), [("Vae", [1, 64, 64, 3]), ("VideoVae", [5, 32, 32, 3])])
def test_decoding_is_in_float32_and_leaves_nothing(kind: str, shape: list[int], host: HostServer) -> None:
    empty = {
        "Vae": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "VideoVae": node("EmptyHunyuanLatentVideo", width=32, height=32, length=5, batch_size=1),
    }
    graph = {
        "empty": empty[kind],
        "vae": loaded(kind),
        "decode": node("BallastVAEDecode", pipeline=["vae", 0], latent=["empty", 0]),
        "ours": seen("decode", 0),
    }
    entry = host.run(graph)
    assert card_at(entry, "ours")["allocated_bytes"] == 0
    kind_of, sizes = summary(entry, "ours").split(" ", 1)
    assert (kind_of, sizes.startswith(str(shape))) == ("float32", True)
    theirs = {"theirs": node("VAEDecode", vae=["vae", 0], samples=["empty", 0]), "seen": seen("theirs", 0)}
    entry = host.run({name: each for name, each in graph.items() if name in ("empty", "vae")} | theirs)
    assert summary(entry, "seen").startswith(f"float32 {shape}")
    assert summary(entry, "seen") != sizes, "the host has it in bfloat16"


def frees(wait_for: str, **roles: bool) -> dict[str, Any]:
    chosen = {role: role in roles for role in ("text_encoders", "transformers", "vaes")}
    return node("BallastFreeVRAM", value=[wait_for, 0], host_models=True, **chosen)


def test_free_vram_by_role_frees_both(host: HostServer) -> None:
    graph = our_run() | native_run(wait_for="sample")
    graph["vaes"] = frees("native", vaes=True)
    graph["transformers"] = frees("vaes", transformers=True)
    outputs = host.run(graph)["outputs"]
    first, second = (outputs[name]["text"][0] for name in ("vaes", "transformers"))
    size = r"([\d.]+ MB)"
    names = ["shapes, transformer", r"BaseModel \(ComfyUI, diffusion model\)"]
    kept = "\n".join(
        [rf"sim:0: {size} -> \1, freed 0 B", *(rf"{name}: {size} -> \{i + 2}" for i, name in enumerate(names))]
    )
    gone = "\n".join([rf"sim:0: {size} -> 0 B, freed \1", *(rf"{name}: {size} -> 0 B" for name in names)])
    before, after_it = re.fullmatch(kept, first), re.fullmatch(gone, second)
    assert before and after_it, outputs
    assert before.groups() == after_it.groups()


def test_host_and_pack_take_turns_on_one_small_card(host: HostServer) -> None:
    graph = our_run(seed=6) | native_run(seed=6, wait_for="sample")
    graph |= our_run(seed=7, name="again", wait_for="native") | native_run(seed=7, name="last", wait_for="again")
    graph |= {"clip": loaded("Clip", seed=4), "late": after("clip", "sample"), "encode": encoding("late")}
    entry = host.run(graph)
    cards = {name: card_at(entry, f"seen {name}") for name in ("sample", "native", "again", "last")}
    for card in cards.values():
        assert 0 < card["allocated_bytes"] <= card["peak_bytes"] <= card["total_bytes"]
    assert cards["sample"]["loaded"]["shapes transformer"] == OURS, "wholly there"
    assert cards["native"]["loaded"]["BaseModel"] == UNET
    assert "SD1ClipModel 6.24 MB in VRAM, now gone" in texts(host)["encode"], "as wanted beside ours"
    host.free()
    assert summary(entry, "seen again") == summary(host.run(our_run(seed=7)), "seen sample")
    alone = native_run(seed=7) | {"clip": loaded("Clip", seed=4)}
    # Not to the bit: the host runs both prompts at once or one by one, whichever fits.
    last, expected = summary(entry, "seen last")["samples"], summary(host.run(alone), "seen native")["samples"]
    assert last.split("; ")[1] == expected.split("; ")[1]


def test_host_moves_our_models_as_its_own(host: HostServer) -> None:
    """Its encoder, its UNet and our transformer do not fit side by side: it asks ours to go, through its own list."""
    graph = our_run(seed=8) | {
        "clip": loaded("Clip", seed=5),
        "late": after("clip", "sample"),
        "theirs": node("CLIPTextEncode", clip=["late", 0], text="a prompt"),
        "seen": seen("theirs", 0),
    }
    entry = host.run(graph)
    assert card_at(entry, "seen sample")["loaded"]["shapes transformer"] == OURS
    card = card_at(entry, "seen")
    assert card["loaded"]["SD1ClipModel"] == CLIP, "wholly there"
    assert card["loaded"].get("shapes transformer", 0) < OURS
    assert card["allocated_bytes"] == sum(card["loaded"].values()), "each says what it holds"


def test_unload_button_empties_both(host: HostServer) -> None:
    host.run(native_run())
    host.free()
    host.run(our_run(seed=9) | native_run(seed=9, wait_for="sample"))
    assert len([size for size in host.device()["loaded"].values() if size]) == 2
    host.free(unload_models=True, free_memory=False)
    assert host.device()["allocated_bytes"] == 0 and not any(host.device()["loaded"].values())
    host.run(our_run(seed=10) | native_run(seed=10, wait_for="sample"))


def test_thirty_prompts_of_two_models_end_where_they_began(host: HostServer) -> None:
    """The host's model and ours in turn: after each prompt of a kind the card holds the same, and RAM does not grow."""
    levels: dict[str, list[int]] = {"native": [], "ours": []}
    resident: list[int] = []
    for number in range(30):
        kind = "ours" if number % 2 else "native"
        host.run(our_run(seed=number) if number % 2 else native_run(seed=number))
        levels[kind].append(host.device()["allocated_bytes"])
        resident.append(host.ram_bytes())
    for kind, found in levels.items():
        assert max(found[1:]) <= 1.02 * min(found[1:]), (kind, found)
    assert max(resident[-4:]) <= 1.02 * max(resident[8:12]), resident
    host.free()
    assert host.device()["allocated_bytes"] == 0


def test_node_that_fails_in_the_middle_leaves_the_others_and_the_card(host: HostServer) -> None:
    prompt = native_run() | our_run()
    prompt["sample"]["inputs"]["width"] = 63
    entry = host.run(prompt, check=False)
    assert "BallastSampler: ValueError: width is 63" in str(host.error(entry))
    again = host.run(native_run() | our_run())
    assert {"clip", "unet", "load"} & set(host.cached(again)), "what was done before it failed is not done again"
    host.free()
    assert host.device()["allocated_bytes"] == 0


def test_vram_budget_shrinks_the_hosts_model_and_nothing_else_changes(host: HostServer) -> None:
    free = native_run(seed=4)
    expected = host.run(free)
    host.free()
    graph = free | {"budget": node("BallastVramBudget", model=["unet", 0], vram_gb=0.003)}
    graph["native"] = {**free["native"], "inputs": {**free["native"]["inputs"], "model": ["budget", 0]}}
    host.events.clear()
    entry = host.run(graph)
    assert summary(entry, "seen native") == summary(expected, "seen native")
    assert card_at(entry, "seen native")["loaded"]["BaseModel"] < UNET / 2
    assert entry["outputs"]["budget"]["text"] == [
        "target 3.07 MB of 12.0 MB on sim:0; weights that do not fit stay in RAM"
    ]
    said = texts(host)["budget"]
    assert re.fullmatch(r"peak [\d.]+ MB of 3.07 MB; .* of 4.12 MB stayed(; [\d.]+ [KM]B over the target)?", said), said


def test_timeline_of_a_purely_native_graph(host: HostServer) -> None:
    """None of our nodes but the report: ComfyUI's models are told and drawn."""
    entry = host.run(native_timeline())
    (picture,) = entry["outputs"]["shown"]["images"]
    data = host.get(f"/view?filename={picture['filename']}&type=temp&subfolder={picture['subfolder']}")
    state, stages = entry["outputs"]["report"]["text"][0].split("\n\n")
    assert "AutoencoderKL (ComfyUI)  vae " in state, "for whose room the others left"
    assert " of ComfyUI's models, " in state.splitlines()[0] and "of weights" not in state
    assert all(name in stages for name in MODELS), stages
    rows = [line.split()[0] for line in stages.splitlines()[2:] if not line.startswith(" ")]
    assert rows == ["CLIPTextEncode", "CLIPTextEncode", "KSampler", "VAEDecode"]
    bands = drawn(Image.open(BytesIO(data)).convert("RGB"))
    assert all(count > 50 for count in bands.values()), bands
    assert "cannot tell what a node did" not in host.log
