"""Bad input gets one clear line - what, where, what to do - and nothing half-loaded stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import ballast
import pytest
import torch

Folders = Callable[[str], Path]


@pytest.fixture
def copied(tiny_folders: Folders, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folders("lumina2"), tmp_path / "model")


def refusal(folder: Path, error: type[Exception] = ValueError) -> str:
    """What opening and encoding say; one line, and nothing on the device."""
    with pytest.raises(error) as caught:
        ballast.open_pipeline(folder, device="cpu").encode("a boat")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


@pytest.mark.parametrize(
    "part", ["text_encoder/model", "transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model"]
)
@pytest.mark.parametrize("left", [0, 5, 1000, -1])
def test_truncated_safetensors(copied: Path, part: str, left: int) -> None:
    path = copied / f"{part}.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    message = refusal(copied)
    assert path.name in message
    assert "Download it again" in message


def test_damaged_header(copied: Path) -> None:
    path = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:20] = b"x" * 12
    path.write_bytes(bytes(content))
    assert "damaged" in refusal(copied)


def test_header_of_absurd_size(copied: Path) -> None:
    path = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    assert "not a whole safetensors file" in refusal(copied)


def test_weights_that_lack_tensors(copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = copied / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if "layers.0" in name)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    message = refusal(copied)
    assert name.removeprefix("model.") in message
    assert "text_encoder" in message


def test_missing_component(copied: Path) -> None:
    shutil.rmtree(copied / "transformer")
    assert "transformer" in refusal(copied, FileNotFoundError)


def test_missing_shard(copied: Path) -> None:
    folder = copied / "transformer"
    index = {"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    assert "00001-of-00002" in refusal(copied, FileNotFoundError)


def test_shard_outside_of_the_folder(copied: Path) -> None:
    folder = copied / "transformer"
    index = {"weight_map": {"a": "../vae/diffusion_pytorch_model.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    assert "../vae" in refusal(copied)


def test_wrong_folder(tmp_path: Path) -> None:
    assert "model_index.json" in refusal(tmp_path, FileNotFoundError)
    assert "not a folder" in refusal(tmp_path / "nowhere", FileNotFoundError)


def test_pickled_weights_are_refused_by_name(copied: Path) -> None:
    path = copied / "text_encoder" / "model.safetensors"
    path.rename(path.with_name("pytorch_model.bin"))
    message = refusal(copied)
    assert "pytorch_model.bin" in message
    assert "pickle" in message


def test_unknown_pipeline_class(copied: Path) -> None:
    edit(copied / "model_index.json", _class_name="OldbiePipeline")
    assert "OldbiePipeline" in refusal(copied)
    edit(copied / "model_index.json", _class_name="logger")
    assert "unknown pipeline class" in refusal(copied)


@pytest.mark.parametrize(
    "entry", [["os", "system"], ["my_code", "Model"], ["transformers", "nothing"], ["diffusers", "logging"]]
)
def test_component_class_from_elsewhere(copied: Path, entry: list[str]) -> None:
    edit(copied / "model_index.json", transformer=entry)
    assert entry[1] in refusal(copied)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_model_index_that_is_no_object(copied: Path, content: str) -> None:
    (copied / "model_index.json").write_text(content)
    assert "model_index.json" in refusal(copied)


def test_component_path_out_of_the_folder(copied: Path) -> None:
    edit(copied / "model_index.json", **{"../vae": ["diffusers", "AutoencoderKL"]})
    assert "../vae" in refusal(copied)


@pytest.mark.parametrize(
    ("width", "height", "named"), [(63, 65, "width"), (64, 65, "height"), (0, 64, "width"), (-16, 64, "width")]
)
def test_size_that_the_model_cannot_make(copied: Path, sim: ModuleType, width: int, height: int, named: str) -> None:
    pipe = ballast.open_pipeline(copied, device="sim")
    cond = pipe.encode("a boat")
    with pytest.raises(ValueError, match=f"{named} is .* multiples of 16") as caught:
        pipe.sample(cond, width=width, height=height, steps=1)
    assert "\n" not in str(caught.value)
    assert pipe.denoisers[0].tier == "disk"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite(copied: Path, sim: ModuleType, value: float) -> None:
    pipe = ballast.open_pipeline(copied, device="sim")
    latents = torch.zeros(1, 4, 4, 6)
    latents[0, 0, 0, 0] = value
    with pytest.raises(ValueError, match=r"NaN or infinite.*bfloat16") as caught:
        pipe.decode(latents)
    assert "\n" not in str(caught.value)
    assert pipe.decoder.tier == "disk"


def test_decoder_that_makes_nan_names_the_remedy(copied: Path, sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(copied, device="sim")
    with pytest.raises(ValueError, match="the decoder made NaN"):
        pipe.decode(torch.full((1, 4, 4, 6), 3e38))
    assert sim.stats().allocated_bytes == 0


def test_latents_of_another_model(copied: Path) -> None:
    pipe = ballast.open_pipeline(copied, device="cpu")
    with pytest.raises(ValueError, match="16 channels.*takes 4"):
        pipe.decode(torch.zeros(1, 16, 4, 6))


def test_conditioning_of_another_pipeline(copied: Path, tiny_folders: Folders) -> None:
    other = ballast.open_pipeline(tiny_folders("flux"), device="cpu").encode("a boat", max_sequence_length=16)
    with pytest.raises(ValueError, match="conditioning was made by flux, not"):
        ballast.open_pipeline(copied, device="cpu").sample(other, width=48, height=32, steps=1)


def test_unknown_arguments_list_the_known_ones(copied: Path) -> None:
    pipe = ballast.open_pipeline(copied, device="cpu")
    with pytest.raises(TypeError, match=r"no argument max_length.*max_sequence_length"):
        pipe.encode("a boat", max_length=3)
    with pytest.raises(TypeError, match=r"no argument cfg.*cfg_trunc_ratio"):
        pipe.sample(pipe.encode("a boat"), width=48, height=32, cfg=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"strategy": "fast"}, "unknown strategy 'fast'"),
        ({"frames": 9}, "makes pictures, not videos"),
    ],
)
def test_other_bad_arguments_of_sample(copied: Path, arguments: dict, message: str) -> None:
    pipe = ballast.open_pipeline(copied, device="cpu")
    with pytest.raises(ValueError, match=message):
        pipe.sample(pipe.encode("a boat"), **{"width": 48, "height": 32, "steps": 1, **arguments})


def test_frames_that_the_model_cannot_make(tiny_folders: Folders) -> None:
    pipe = ballast.open_pipeline(tiny_folders("wan"), device="cpu")
    with pytest.raises(ValueError, match="frames is 8; .* such as 9"):
        pipe.sample(pipe.encode("a boat"), width=48, height=32, steps=1, frames=8)


@pytest.mark.parametrize(
    ("opening", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": None}, "^unknown device 'None'"),
        ({"device": "cpu", "vram": "lots"}, "not a size: 'lots'"),
        ({"device": "cpu", "vram": -1}, "not a size: -1"),
        ({"device": "cpu", "dtype": "int3"}, "unknown dtype 'int3'"),
    ],
)
def test_bad_arguments_of_open(copied: Path, opening: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ballast.open_pipeline(copied, **opening)


def test_sharded_variant_that_misses_a_shard(copied: Path) -> None:
    from diffusers import Lumina2Transformer2DModel

    folder = copied / "transformer"
    model = Lumina2Transformer2DModel.from_pretrained(folder)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    model.save_pretrained(folder, variant="fp16", max_shard_size="50KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    pipe = ballast.open_pipeline(copied, device="cpu")
    assert pipe.sample(pipe.encode("a boat"), width=48, height=32, steps=1).isfinite().all()
    shards[-1].unlink()
    assert shards[-1].name in refusal(copied, FileNotFoundError)


def test_whole_variant_beside_an_index_without_its_shards(copied: Path) -> None:
    folder = copied / "transformer"
    path = folder / "diffusion_pytorch_model.safetensors"
    path.rename(path.with_name("diffusion_pytorch_model.fp16.safetensors"))
    index = {"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    pipe = ballast.open_pipeline(copied, device="cpu")
    assert pipe.sample(pipe.encode("a boat"), width=48, height=32, steps=1).isfinite().all()


def test_encoder_that_the_index_does_not_name(tiny_folders: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folders("sd3"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    del index["text_encoder_2"], index["tokenizer_2"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert "text_encoder_2" in refusal(folder)


def test_quantized_weights_are_refused(copied: Path) -> None:
    edit(copied / "transformer" / "config.json", quantization_config={"quant_method": "gptq"})
    assert "quantized weights (gptq)" in refusal(copied)


def test_latents_with_frames_for_a_picture(copied: Path) -> None:
    with pytest.raises(ValueError, match="in 5 dimensions"):
        ballast.open_pipeline(copied, device="cpu").decode(torch.zeros(1, 4, 1, 4, 6))


def test_a_scheduler_whose_package_is_missing(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is missing is named: torch is always there."""
    from diffusers.utils.dummy_torch_and_torchsde_objects import DPMSolverSDEScheduler

    monkeypatch.setattr("diffusers.DPMSolverSDEScheduler", DPMSolverSDEScheduler)
    edit(copied / "model_index.json", scheduler=["diffusers", "DPMSolverSDEScheduler"])
    if find_spec("torchsde") is None:
        assert "packages that are not installed: torchsde. Install" in refusal(copied, ImportError)
    else:
        assert "torchsde" in refusal(copied, ImportError)
