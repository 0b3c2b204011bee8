"""NewBie's and Pyramid-Flow's folders and files in fewer bits: as their decoded weights run, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import newbie_folders
import pyramid_folders
import pytest
import torch
from ballast.memory.weights.encoded import encoded_weights
from ballast.memory.weights.encoding import EncodedWeight
from safetensors.torch import load_file, save_file
from selection import few
from test_quantised_files import BF16, WRITERS, decoded
from tiny_parts import tokenizer

NEWBIE: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "guidance": 4.5}
PYRAMID: dict[str, Any] = {"width": 64, "height": 64, "frames": 9, "steps": 2, "guidance": 2.0}


def quantise(part: Path, plain: Path, how: str) -> Path:
    """Put quantised weights in place of a part's, and what they are decoded to in place of `plain`'s."""
    (file,) = [part] if part.is_file() else part.glob("*.safetensors")
    (same,) = [plain] if plain.is_file() else plain.glob("*.safetensors")
    weights = load_file(file)
    file.unlink()
    made = WRITERS[how](file, weights)
    values = {
        name: decoded(weight).reshape(weights[name].shape) for name, weight in encoded_weights(made, BF16).items()
    }
    save_file({name: value.contiguous() for name, value in values.items()}, same)
    return made


def runs_alike(ours: Any, plain: Any, sizes: dict[str, Any], sim: ModuleType) -> None:
    cond = plain.encode("a boat", "blurry")
    expected = plain.sample(cond, **sizes, strategy="resident")
    own = ours.encode("a boat", "blurry")
    for name, value in cond.tensors.items():
        assert torch.equal(own.tensors[name], value), name
    (dit,) = ours.denoisers
    assert any(isinstance(source, EncodedWeight) for source in dit.source().values())
    assert dit.size_bytes < 0.9 * plain.denoisers[0].size_bytes
    for strategy in ("resident", "streamed", "leafwise"):
        assert torch.equal(ours.sample(cond, **sizes, strategy=strategy), expected), strategy
        assert sim.stats().allocated_bytes == 0
    assert sim.stats().hazards == 0


@pytest.mark.parametrize("how", few(["q8_0", "int8", "fp8 of one scale"], "int8"))
def test_newbie_folder(how: str, tmp_path: Path, sim: ModuleType) -> None:
    """Queries, keys and values are split by rows; Gemma is quantised too."""
    plain = newbie_folders.official(tmp_path / "plain")
    ours = Path(shutil.copytree(plain, tmp_path / "ours"))
    quantise(ours / "transformer", plain / "transformer", how)
    quantise(ours / "text_encoder", plain / "text_encoder", how)
    pair = [ballast.open_pipeline(folder, device="sim", dtype="bf16") for folder in (ours, plain)]
    runs_alike(*pair, NEWBIE, sim)


@pytest.mark.parametrize("how", few(["q8_0", "fp8 of one scale"], "fp8 of one scale"))
def test_newbie_files(how: str, tmp_path: Path, sim: ModuleType) -> None:
    """As ComfyUI has them, sizes from the file itself."""
    source = newbie_folders.official(tmp_path / "source")
    plain, ours = (newbie_folders.split_files(tmp_path / name, source) for name in ("plain", "ours"))
    ours["transformer"] = quantise(ours["transformer"], plain["transformer"], how)
    pair: list[Any] = []
    for files in (ours, plain):
        transformer, words = files.pop("transformer"), tokenizer()
        pair.append(ballast.open_pipeline(transformer, device="sim", dtype="bf16", **files))
        pair[-1].model._tokenizers = {"gemma": words, "jina": words}  # those in files have tests of their own
    runs_alike(*pair, NEWBIE, sim)


@pytest.mark.parametrize(
    ("kind", "how"),
    [pytest.param("flux", "q8_0", marks=pytest.mark.long), pytest.param("mmdit", "int8", marks=pytest.mark.soak)],
)
def test_pyramid_folder(kind: str, how: str, tmp_path: Path, sim: ModuleType) -> None:
    plain = pyramid_folders.save(kind, tmp_path / "plain")
    ours = Path(shutil.copytree(plain, tmp_path / "ours"))
    part = "diffusion_transformer_384p"
    quantise(ours / part, plain / part, how)
    pair = [ballast.open_pipeline(folder, device="sim", dtype="bf16") for folder in (ours, plain)]
    runs_alike(*pair, PYRAMID, sim)


def test_an_adapter_beside_quantised_weights_is_refused(tmp_path: Path) -> None:
    """Jina's adapter would be merged into weights that are stored in fewer bits."""
    folder = newbie_folders.official(tmp_path / "model")
    (file,) = (folder / "clip_model").glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name, value in weights.items() if name.endswith("Wqkv.weight") or value.ndim == 2)
    layer, value = name.removesuffix(".weight"), weights.pop(name)
    weights[f"{layer}.parametrizations.weight.original"] = value.to(torch.float8_e4m3fn)
    weights[f"{layer}.parametrizations.weight.0.lora_A"] = torch.zeros(1, 2, value.shape[1])
    weights[f"{layer}.parametrizations.weight.0.lora_B"] = torch.zeros(1, value.shape[0], 2)
    save_file(weights, file)
    with pytest.raises(ValueError, match="quantized|Get the plain") as error:
        ballast.open_pipeline(folder, device="cpu", dtype="bf16").encode("a boat")
    assert "\n" not in str(error.value)
