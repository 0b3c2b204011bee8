"""Text encoders and VAEs from single files beside a base that has none of their weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from ballast.pipelines.files.components import read_components, read_model_index
from ballast.pipelines.files.single.given import GivenFiles
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from single_files import base_of, state_of, transformer_file
from single_files.original_names import original_vae, original_wan_vae
from single_files.original_vaes import LTX_VAES, ltx_vae, original_dc_vae, original_flux2_vae, original_ltx_vae

Folders = Callable[[str], Path]
State = dict[str, torch.Tensor]

# Encoders of the kinds that there are, and names as their files have them.
ENCODERS: list[tuple[str, str, Callable[[State], State]]] = [
    ("flux", "text_encoder", dict),  # CLIP-L
    ("flux", "text_encoder", lambda s: s | {"text_projection.weight": torch.ones(4), "logit_scale": torch.ones(())}),
    ("sd3", "text_encoder_2", dict),  # CLIP-G, with a projection
    ("flux", "text_encoder_2", dict),  # T5
    ("flux", "text_encoder_2", lambda s: s | {"encoder.embed_tokens.weight": s["shared.weight"].clone()}),
    ("flux", "text_encoder_2", lambda s: {f"text_encoders.t5xxl.transformer.{k}": t for k, t in s.items()}),
    ("wan", "text_encoder", lambda s: s | {"spiece_model": torch.zeros(9, dtype=torch.uint8)}),  # UMT5
    ("qwenimage", "text_encoder", dict),  # Qwen2.5-VL
    ("qwenimage", "text_encoder", lambda s: {k.replace("language_model.", ""): t for k, t in s.items()}),
    ("zimage", "text_encoder", lambda s: {f"model.{k}": t for k, t in s.items()}),  # Qwen3
    ("flux2_klein", "text_encoder", dict),  # with a head
    ("lumina2", "text_encoder", lambda s: {f"model.{k.removeprefix('model.')}": t for k, t in s.items()}),  # Gemma 2
    ("hunyuan_video", "text_encoder", lambda s: {f"model.{k.removeprefix('model.')}": t for k, t in s.items()}),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


def part(base: Path, name: str, files: GivenFiles) -> Any:
    index = {name: read_model_index(base)[name]}
    makers = {key: make for key, make in files.components(index).items() if key == name}
    found = read_components(base, index, None, None, makers)
    files.check_read(found.values())
    return found[name]


@pytest.mark.parametrize(("family", "name", "change"), ENCODERS)
def test_encoders_have_the_weights_of_the_folder(
    family: str, name: str, change: Callable[[State], State], tiny_folders: Folders, tmp_path: Path, kept: Path
) -> None:
    """Against transformers' own, bit for bit, from names with and without prefixes, and beside what is not read."""
    folder = tiny_folders(family)
    index = {name: read_model_index(folder)[name]}
    expected = read_components(folder, index, None)[name]._read()
    path = tmp_path / "encoder.safetensors"
    save_file(change(dict(state_of(folder, name))), path)
    found = part(base_of(folder, kept / f"{family}-{name}", name), name, GivenFiles(path, (path,)))
    unit = found.unit("")
    unit.load()
    state = unit.module.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.state_dict().items())
    assert unit.source() is not None  # it streams from the file too


def wan_vae() -> Any:
    sizes = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    return diffusers.AutoencoderKLWan(**sizes, temperal_downsample=[False, True, True], latents_mean=[0.0] * 4)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["flux", "pixart_sigma", "wan", "qwenimage"])
def test_vaes_have_the_weights_of_the_folder(
    name: str, plain: bool, tiny_folders: Folders, tmp_path: Path, kept: Path
) -> None:
    base = base_of(tiny_folders(name), tmp_path / "base", "vae")
    index = {"vae": read_model_index(base)["vae"]}
    if name in ("wan", "qwenimage"):
        torch.manual_seed(0)
        vae = wan_vae()
        state = vae.state_dict()
        config = json.loads(vae.to_json_string()) | {"_class_name": index["vae"][1]}
        (base / "vae" / "config.json").write_text(json.dumps(config), "utf-8")
        tensors = original_wan_vae(state)
        back = single_file_utils.convert_wan_vae_to_diffusers(dict(tensors))
    else:
        state = state_of(tiny_folders(name), "vae")
        tensors = original_vae(state)
        config = json.loads((base / "vae" / "config.json").read_text("utf-8"))
        back = single_file_utils.convert_ldm_vae_checkpoint(dict(tensors), config)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in state.items())
    path = tmp_path / "ae.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in (state if plain else tensors).items()}, path)
    unit = part(base, "vae", GivenFiles(path, vae=path)).unit("")
    unit.load()
    assert all(torch.equal(unit.module.state_dict()[key], tensor) for key, tensor in state.items())


# A family, with a version where there are several; its inverse, and diffusers' converter where there is one.
OTHER_VAES: dict[str, tuple[Callable[[State], State], str]] = {
    "flux2_klein": (original_flux2_vae, ""),
    "sana": (original_dc_vae, "convert_autoencoder_dc_checkpoint_to_diffusers"),
    "hunyuan_video": (dict, ""),
    **{
        f"ltx {version}": (partial(original_ltx_vae, version=version), "convert_ltx_vae_checkpoint_to_diffusers")
        for version in LTX_VAES
    },
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", OTHER_VAES)
def test_other_vaes_have_the_weights_of_the_folder(
    name: str, plain: bool, tiny_folders: Folders, tmp_path: Path
) -> None:
    """Their buffers too: the statistics of latents."""
    family, _, version = name.partition(" ")
    base = base_of(tiny_folders(family), tmp_path / "base", "vae")
    original, converter = OTHER_VAES[name]
    if version:
        vae = ltx_vae(version)
        state = vae.state_dict()
        (base / "vae" / "config.json").write_text(vae.to_json_string(), "utf-8")
    else:
        state = state_of(tiny_folders(family), "vae")
    tensors = original(state)
    if converter:
        prefix = "vae." if version else ""
        back = getattr(single_file_utils, converter)({prefix + key: tensor for key, tensor in tensors.items()})
        assert back.keys() == state.keys()
        assert all(torch.equal(back[key], tensor) for key, tensor in state.items())
    path = tmp_path / "vae.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in (state if plain else tensors).items()}, path)
    unit = part(base, "vae", GivenFiles(path, vae=path)).unit("")
    unit.load()
    made = unit.module.state_dict()
    assert made.keys() == state.keys()
    assert all(torch.equal(made[key], tensor) for key, tensor in state.items())
    assert not [tensor for tensor in made.values() if tensor.is_meta]


def test_all_parts_from_files(tiny_folders: Folders, tmp_path: Path, kept: Path, sim: ModuleType) -> None:
    """The encoders in any order: the latents and the picture of the stock pipeline, and nothing left."""
    folder = tiny_folders("flux")
    base = base_of(folder, kept / "none", "text_encoder", "text_encoder_2", "vae")
    path = transformer_file("flux", folder, tmp_path / "flux.safetensors")
    files = [tmp_path / "t5.safetensors", tmp_path / "clip.safetensors"]
    for file, name in zip(files, ("text_encoder_2", "text_encoder"), strict=True):
        save_file(state_of(folder, name), file)
    save_file(original_vae(state_of(folder, "vae")), vae := tmp_path / "ae.safetensors")
    expected = tiny.stock(folder)
    _, encode, sample, decode = tiny.stages("flux", path, "sim", base=base, text_encoders=files, vae=vae)
    latents = sample(encode())
    torch.testing.assert_close(latents, expected[0].float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(decode(latents), expected[1], atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        ballast.open_pipeline(path, device="cpu", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_fits_no_part(tiny_folders: Folders, tmp_path: Path, kept: Path) -> None:
    folder = tiny_folders("flux")
    path = transformer_file("flux", folder, tmp_path / "flux.safetensors")
    save_file(state_of(tiny_folders("lumina2"), "text_encoder"), gemma := tmp_path / "gemma.safetensors")
    save_file(state_of(folder, "text_encoder"), clip := tmp_path / "clip.safetensors")
    whole, bare = base_of(folder, kept / "flux"), base_of(folder, kept / "bare", "text_encoder_2")
    said = refusal(path, base=whole, text_encoders=[gemma])
    assert str(gemma) in said and "CLIPTextModel" in said and "T5EncoderModel" in said
    said = refusal(path, base=bare, text_encoders=[gemma])
    assert "text_encoder_2" in said and str(gemma) in said
    said = refusal(path, base=whole, vae=clip)
    assert str(clip) in said and "VAE" in said
    assert "takes no text_encoders" in refusal(folder, text_encoders=[clip])


def test_an_encoder_with_a_weight_too_many(tiny_folders: Folders, tmp_path: Path, kept: Path) -> None:
    folder = tiny_folders("flux")
    path = transformer_file("flux", folder, tmp_path / "flux.safetensors")
    state = state_of(folder, "text_encoder")
    save_file(state | {"encoder.layers.7.mlp.fc1.weight": torch.zeros(2)}, clip := tmp_path / "clip.safetensors")
    said = refusal(path, base=base_of(folder, kept / "flux"), text_encoders=[clip])
    assert "encoder.layers.7.mlp.fc1.weight" in said
