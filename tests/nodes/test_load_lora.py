"""Load LoRA (Ballast): a reference in, a reference with the LoRA out; nothing else is touched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import pytest
import tiny
import torch
from adapters import lora_files
from ballast.memory import manager
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.load_lora import LoadLora
from ballast.nodes.sample import Sampler
from host import page, run_node
from places import clear
from safetensors.torch import load_file

NAME = "loras_zimage"


@pytest.fixture(scope="module")
def loras(tiny_folders: Callable[[str], Path]) -> Iterator[list[str]]:
    """A pipeline in models/diffusers, and two LoRAs for it in models/loras, by name."""
    folder = Path(folder_paths.get_folder_paths("diffusers")[0]) / NAME
    files = Path(folder_paths.get_folder_paths("loras")[0])
    files.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(tiny_folders("zimage"), target_is_directory=True)
    made = [path for path, _ in lora_files.two(folder, files)]
    yield [path.name for path in made]
    folder.unlink()
    clear(files)


def load(**more: Any) -> Any:
    return run_node(LoadPipeline, pipeline=NAME, device="sim", **more).result[0]


def with_lora(reference: Any, lora: str, strength: float) -> Any:
    return run_node(LoadLora, pipeline=reference, lora=lora, strength=strength).result[0]


def latents(reference: Any) -> torch.Tensor:
    given = {"prompt": "a red boat", "negative_prompt": "blurry, grey"}
    conditioning = run_node(TextEncode, pipeline=reference, **given).result[0]
    width, height = tiny.FAMILIES["zimage"].size
    size = {"width": width, "height": height, "steps": 2}
    return run_node(Sampler, pipeline=reference, conditioning=conditioning, **size).result[0]["samples"]


@pytest.mark.long
def test_chained_loras_are_those_of_the_library(loras: list[str], sim: ModuleType) -> None:
    plain = load()
    before = latents(plain)
    one = with_lora(plain, loras[0], 0.8)
    both = with_lora(one, loras[1], -0.3)
    assert [strength for _, _, strength, _ in both.loras] == [0.8, -0.3] and not plain.loras
    found = latents(both)
    pipe = plain.open().within()
    files = Path(folder_paths.get_folder_paths("loras")[0])
    pipe.set_loras([(files / loras[0], 0.8), (files / loras[1], -0.3)])
    assert both.open().denoisers == plain.open().denoisers, "the weights are shared"
    read = manager("sim").disk_bytes_read
    assert torch.equal(latents(both), found) and not torch.equal(latents(one), found)
    assert torch.equal(latents(plain), before) and not torch.equal(before, found)
    assert manager("sim").disk_bytes_read == read, "no weight is read for another LoRA"


def test_strength_zero_is_the_pipeline_itself(loras: list[str], sim: ModuleType) -> None:
    plain = load()
    assert with_lora(plain, loras[0], 0.0) is plain


def test_equal_references_share_a_pipeline(loras: list[str], sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one with another strength reads no file again."""
    plain = load()
    one, same = (with_lora(plain, loras[0], 0.8) for _ in range(2))
    assert one == same and one.open() is same.open() is not plain.open()
    before = LoadLora.fingerprint_inputs(lora=loras[0], strength=0.8)
    assert before != LoadLora.fingerprint_inputs(lora=loras[0], strength=0.7)
    assert LoadLora.fingerprint_inputs(lora="gone.safetensors") == "1.0 "


def test_the_second_transformer_has_its_own(
    loras: list[str], tiny_folders: Callable[[str], Path], tmp_path: Path, sim: ModuleType
) -> None:
    """Named, it is for that one alone; a model without one says so."""
    pipe = tiny.FAMILIES["wan"].build()
    pipe.register_modules(transformer_2=type(pipe.transformer).from_config(pipe.transformer.config))
    pipe.register_to_config(boundary_ratio=0.9)
    folder = Path(folder_paths.get_folder_paths("diffusers")[0]) / "two_experts"
    pipe.save_pretrained(folder)
    files = Path(folder_paths.get_folder_paths("loras")[0])
    lora_files.write(files / "wan.safetensors", lora_files.weights(pipe.transformer, 4))
    plain = run_node(LoadPipeline, pipeline="two_experts", device="sim").result[0]
    given: dict[str, Any] = {"pipeline": plain, "lora": "wan.safetensors", "strength": 0.8}
    for more, worn in (({}, {"transformer": 0.8}), ({"transformer": "transformer_2"}, {"transformer_2": 0.8})):
        made = run_node(LoadLora, **given, **more).result[0]
        (lora,) = made.open().runner.loras
        assert lora.strengths == worn and set(lora.adapters) == set(worn)
        assert hash(made) != hash(plain)
    del given["pipeline"]
    one, second = (LoadLora.fingerprint_inputs(**given, transformer=name) for name in ("auto", "transformer_2"))
    assert one != second and one == LoadLora.fingerprint_inputs(**given)
    with pytest.raises(ValueError, match=r"has a strength for transformer_2\. Name one of transformer"):
        run_node(LoadLora, pipeline=load(), lora=loras[0], strength=1.0, transformer="transformer_2")
    clear(folder)


def test_the_node_says_what_the_file_does(loras: list[str], sim: ModuleType) -> None:
    """The model that it was made for, and its trigger words or most frequent tags; what is not text is left out."""
    files = Path(folder_paths.get_folder_paths("loras")[0])
    tensors = load_file(files / loras[0])
    tags = json.dumps({"10_boats": {"boat": 9, "sea": 12}, "5_more": {"boat": 9, "sky": 1}})
    for notes, said in (
        (
            {"modelspec.architecture": "Z-Image", "modelspec.trigger_phrase": "a sks\n boat"},
            "made for Z-Image.\ntrigger words: a sks boat.",
        ),
        ({"ss_tag_frequency": tags}, "trigger words: boat, sea, sky"),
        ({"ss_tag_frequency": "[1"}, None),
    ):
        lora_files.write(files / "told.safetensors", tensors, notes)
        with page() as shown:
            with_lora(load(), "told.safetensors", 1.0)
        texts = [text for _, text in shown.texts if text != "done"]  # which takes the place of an error
        assert texts == ([] if said is None else [said])


def test_a_lora_of_another_model_fails_here(loras: list[str], sim: ModuleType) -> None:
    file = Path(folder_paths.get_folder_paths("loras")[0]) / "other.safetensors"
    lora_files.write(
        file, {"transformer.x.lora_A.weight": torch.ones(4, 4), "transformer.x.lora_B.weight": torch.ones(4, 4)}
    )
    plain = load()
    with pytest.raises(ValueError, match="other.safetensors has weights that ZImage has no place for") as caught:
        with_lora(plain, "other.safetensors", 1.0)
    assert "\n" not in str(caught.value)
    assert not plain.open().runner.loras
