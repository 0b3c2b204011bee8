"""Apply ControlNet (Ballast): a reference in, a reference out that samples with a ControlNet and its picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import folder_paths
import pytest
import torch
from ballast.memory import manager
from ballast.nodes.apply_controlnet import ApplyControlNet
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.plan import VramPlan
from ballast.nodes.sample import Sampler
from node_runner import run_node
from pictured import pipelines as tiny_pictured
from pictured.pictures import picture

WIDTH, HEIGHT = 48, 32
ONE, OTHER = picture(WIDTH, HEIGHT), picture(WIDTH, HEIGHT, 1)
OPAQUE = torch.cat([ONE, torch.ones(1, HEIGHT, WIDTH, 1)], dim=3)
SIZE = {"width": WIDTH, "height": HEIGHT, "steps": 4}


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models/diffusers with Flux in it, and models/controlnet with one for it, as a folder and as a file."""
    whole = tiny_pictured.save("flux_controlnet", tmp_path / "models" / "flux")
    made = tmp_path / "controlnets"
    shutil.move(whole / "controlnet", made / "canny")
    shutil.copy(made / "canny" / "diffusion_pytorch_model.safetensors", made / "union.safetensors")
    index = json.loads((whole / "model_index.json").read_text("utf-8"))
    del index["controlnet"]
    (whole / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}), "utf-8")
    paths = folder_paths.folder_names_and_paths
    monkeypatch.setitem(paths, "diffusers", ([str(tmp_path / "models")], {"folder"}))
    monkeypatch.setitem(paths, "controlnet", ([str(made)], {".safetensors"}))
    return tmp_path


def load(**more: Any) -> Any:
    return run_node(LoadPipeline, pipeline="flux", device="sim", keep_loaded=False, **more).result[0]


def apply(reference: Any, net: str = "union.safetensors", image: torch.Tensor = ONE, **more: Any) -> Any:
    return run_node(ApplyControlNet, pipeline=reference, controlnet=net, image=image, **more).result[0]


def encode(reference: Any) -> Any:
    return run_node(TextEncode, pipeline=reference, prompt="a boat", negative_prompt="").result[0]


def sample(reference: Any, conditioning: Any, **more: Any) -> torch.Tensor:
    given = {"pipeline": reference, "conditioning": conditioning, **SIZE, "guidance": 0.0, "seed": 0, **more}
    return run_node(Sampler, **given).result[0]["samples"]


def test_files_and_folders_are_offered(nets: Path) -> None:
    (nets / "controlnets" / "canny" / "more").mkdir()
    options = ApplyControlNet.INPUT_TYPES()["required"]["controlnet"][1]["options"]
    assert options == ["none", "canny", "union.safetensors"]


def test_it_runs_as_the_library_does(nets: Path, sim: ModuleType) -> None:
    """With a prompt that was encoded before it or behind it, as a file, a folder or a path; settings count."""
    plain = load()
    cond = encode(plain)
    pipe = ballast.open_pipeline(nets / "models" / "flux", device="sim", controlnet=nets / "controlnets" / "canny")
    run: dict[str, Any] = {**SIZE, "control": ONE}
    expected = pipe.sample(cond, **run, control_strength=0.7, control_range=(0.0, 0.5))
    settings = {"strength": 0.7, "end": 0.5}
    one = apply(plain, image=OPAQUE, **settings)
    assert torch.equal(sample(one, cond), expected) and torch.equal(sample(one, encode(one)), expected)
    assert one.open().denoisers[0] is plain.open().denoisers[0], "the weights are shared"
    assert not torch.equal(sample(apply(plain), cond), expected)
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
def test_folders_paths_and_several(nets: Path, sim: ModuleType) -> None:
    plain, canny = load(), nets / "controlnets" / "canny"
    cond, settings = encode(plain), {"strength": 0.7, "end": 0.5}
    expected = sample(apply(plain, **settings), cond)
    for net, path in (("canny", ""), ("none", str(canny))):
        assert torch.equal(sample(apply(plain, net, path=path, **settings), cond), expected)
    assert not torch.equal(sample(plain, cond), expected)
    both = apply(apply(plain, "canny", strength=0.5), "canny", OTHER, start=0.5)
    twice = ballast.open_pipeline(nets / "models" / "flux", device="sim", controlnet=[canny] * 2)
    theirs = {"control": [ONE, OTHER], "control_strength": [0.5, 1.0], "control_range": [(0.0, 1.0), (0.5, 1.0)]}
    assert torch.equal(sample(both, cond), twice.sample(cond, **SIZE, **theirs))


def test_a_plan_counts_it(nets: Path, sim: ModuleType) -> None:
    plain = load()
    given = {**SIZE, "guidance": 0.0, "vram_gb": "1"}
    alone, beside = (run_node(VramPlan, pipeline=each, **given).result[1] for each in (plain, apply(plain)))
    assert "controlnet" in beside and "controlnet" not in alone


def test_the_prompt_is_not_encoded_anew_beside_it(nets: Path, sim: ModuleType) -> None:
    plain = load()
    encode(plain)
    before = len(manager("sim").timeline.stages)
    encode(apply(plain, image=OTHER))
    assert len(manager("sim").timeline.stages) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"net": "none"}, "no ControlNet is chosen"),
        ({"net": "none", "path": "/nowhere/net.safetensors"}, "there is no folder or file"),
        ({"start": 0.6, "end": 0.6}, "Set end above start"),
        ({"union_mode": 1}, "is for a union ControlNet"),
        ({"image": torch.cat([ONE, OTHER]), "twice": True}, "give each of them one"),
        ({"connected": ONE}, "Disconnect control"),
        ({"loader": "canny"}, "the loader has a ControlNet already"),
    ],
)
def test_what_does_not_go_together_is_told_in_a_line(
    given: dict[str, Any], words: str, nets: Path, sim: ModuleType
) -> None:
    loader, connected, twice = (given.get(name) for name in ("loader", "connected", "twice"))
    own = {name: value for name, value in given.items() if name not in ("loader", "connected", "twice")}
    plain = load(**({"controlnet": loader} if loader else {}))
    with pytest.raises((ValueError, FileNotFoundError), match=words) as raised:
        made = apply(apply(plain) if twice else plain, **own)
        sample(made, encode(made), **({"control": connected} if connected is not None else {}))
    assert "\n" not in str(raised.value)


def test_a_changed_file_is_another(nets: Path) -> None:
    path, prints = nets / "controlnets" / "canny" / "config.json", []
    for _ in range(2):
        prints.append(ApplyControlNet.fingerprint_inputs(controlnet="canny"))
        path.write_text(path.read_text("utf-8") + " ", "utf-8")
    assert prints[0] != prints[1]
