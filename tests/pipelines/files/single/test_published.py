"""Files without a base: the configs of the published models come with the pack."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import gguf
import pytest
import tiny
import torch
import transformers
from ballast.bench.downloads import full_size
from ballast.pipelines.files.components import Component, read_model_index
from ballast.pipelines.files.single import published
from ballast.pipelines.files.single.given import GivenFiles
from ballast.pipelines.files.trust import component_class
from safetensors.torch import load_file, save_file
from single_files import state_of, transformer_file
from single_files.comfy_folders import write_gguf
from single_files.published_facts import TOKENIZERS, facts_of, files_of

Folders = Callable[[str], Path]
SHIPPED = published.FACTS
MODELS = sorted(folder.name for folder in (SHIPPED / "models").iterdir())


SOON = ("flux", "hidream")  # the others differ in nothing that these do not have
LATER = ("sd3", "qwenimage", "wan", "lumina2")
EACH = [
    name if name in SOON else pytest.param(name, marks=pytest.mark.long if name in LATER else pytest.mark.soak)
    for name in TOKENIZERS
]


@pytest.mark.parametrize("name", EACH)
def test_files_alone_draw_what_the_stock_pipeline_does(
    name: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folders(name)
    facts_of(name, folder, tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of(name, folder, tmp_path)
    expected = tiny.stock(folder)
    _, encode, sample, decode = tiny.stages(name, given.pop("path"), "sim", cache_dir=tmp_path, **given)
    latents = sample(encode())
    torch.testing.assert_close(latents, expected[0].float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(decode(latents), expected[1], atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0


def test_the_text_of_qwen_from_gguf(tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no tower for pictures: the same conditioning as from safetensors, which has one beside."""
    folder = tiny_folders("qwenimage")
    facts_of("qwenimage", folder, tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of("qwenimage", folder, tmp_path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2VL, 99)
    state = {name: tensor for name, tensor in state_of(folder, "text_encoder").items() if "visual" not in name}
    named = {
        str(names.get_name(name.replace("language_model.", ""), (".weight", ".bias"))): t for name, t in state.items()
    }
    write_gguf(path := tmp_path / "Qwen2.5-VL-7B-Instruct-F32.gguf", named, "qwen2vl")
    conditions = []
    for encoders in (given["text_encoders"], [path]):
        pipe = ballast.open_pipeline(**{**given, "device": "cpu", "text_encoders": encoders, "cache_dir": tmp_path})
        conditions.append(pipe.encode("a red boat", "blurry").tensors)
        assert not [name for name, _ in pipe.encoders[0].module.named_parameters() if "visual" in name]
    assert conditions[0].keys() == conditions[1].keys()
    for key, value in conditions[0].items():
        torch.testing.assert_close(conditions[1][key], value, atol=1e-5, rtol=0)


def test_a_projection_that_does_nothing(tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable Diffusion 3's CLIP-L, whose file has no projection, and which diffusers gives ones in the diagonal."""
    folder = tmp_path / "sd3"
    pipe: Any = tiny.FAMILIES["sd3"].build()
    weight = pipe.text_encoder.text_projection.weight
    weight.copy_(torch.eye(len(weight)))
    pipe.save_pretrained(folder)
    facts_of("sd3", folder, tmp_path / "facts")
    path = tmp_path / "facts" / "models" / "sd3" / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"_unprojected": ["text_encoder"]}), "utf-8")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of("sd3", folder, tmp_path)
    state = state_of(folder, "text_encoder")
    del state["text_projection.weight"]
    save_file(state, given["text_encoders"][0])
    expected = tiny.stock(folder)[0].float()
    pipe, encode, sample, _ = tiny.stages("sd3", given.pop("path"), "sim", cache_dir=tmp_path, **given)
    torch.testing.assert_close(sample(encode()), expected, atol=1e-5, rtol=0)
    assert "_unprojected" in str(pipe.model.components["text_encoder"].identity()), (
        "or embeddings of both are taken for one"
    )


def test_a_vae_in_the_file_of_the_model(
    tiny_folders: Folders, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LTX-Video's, which needs no file of its own; a VAE that is given goes before it."""
    folder = tiny_folders("ltx")
    facts_of("ltx", folder, tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of("ltx", folder, tmp_path)
    path, vae = given.pop("path"), given.pop("vae")
    state = state_of(folder, "vae")
    save_file(load_file(path) | {f"vae.{name}": tensor for name, tensor in state.items()}, path)
    expected = tiny.stock(folder)
    _, encode, sample, decode = tiny.stages("ltx", path, "sim", cache_dir=tmp_path, **given)
    latents = sample(encode())
    torch.testing.assert_close(latents, expected[0].float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(decode(latents), expected[1], atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    pipe = ballast.open_pipeline(path, device="cpu", vae=vae, **given)
    assert pipe.model.components["vae"].single.path == vae


@pytest.fixture
def flux(tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    facts_of("flux", tiny_folders("flux"), tmp_path / "facts", not_named="kontext")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    return files_of("flux", tiny_folders("flux"), tmp_path)


def refusal(given: Mapping[str, Any], **change: Any) -> str:
    with pytest.raises(ValueError) as caught:
        ballast.open_pipeline(**{"device": "cpu", **given, **change})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_missing_is_named(flux: dict[str, Any]) -> None:
    clip, t5 = flux["text_encoders"]
    second = "text_encoder_2 is not chosen: FLUX.1 needs"  # the second file, whichever encoder it is for
    assert refusal(flux, text_encoders=[t5]) == f"{second} CLIPTextModel, such as text_encoder."
    assert refusal(flux, text_encoders=[clip]) == f"{second} T5EncoderModel, such as text_encoder_2."
    said = refusal(flux, text_encoders=[])
    assert "text_encoder (CLIPTextModel) as well, such as text_encoder.safetensors" in said
    said = refusal(flux, text_encoders=[flux["vae"]])
    assert "text_encoder (CLIPTextModel) as well" in said and str(flux["vae"]) in said
    assert "None of the files given fits it" in refusal(flux, text_encoders=[clip, flux["vae"]])
    assert "its vae (AutoencoderKL) as well" in refusal(flux, vae=None)
    said = refusal(flux, tokenizers={"clip": flux["tokenizers"]["clip"]})
    assert "needs the tokenizer of T5" in said and "'t5'" in said and "Give base" in said
    assert "no tokenizers of bert" in refusal(flux, tokenizers={"bert": Path()})
    assert "fits no text encoder" in refusal(flux, text_encoders=[t5, clip, flux["vae"]])
    pickle = t5.with_suffix(".bin")
    pickle.write_bytes(b"\x80\x04" + bytes(60))
    assert "is a pickle" in refusal(flux, text_encoders=[clip, pickle])


def test_another_model_of_that_shape_is_not_taken_for_it(flux: dict[str, Any], tiny_folders: Folders) -> None:
    path = flux["path"].rename(flux["path"].with_name("my-Kontext-mix.safetensors"))
    said = refusal(flux, path=path)
    assert "these are flux" in said and "Give base" in said
    assert "these are flux" in refusal(
        flux, path=path.rename(path.with_name("x.safetensors")), transformer_2=flux["vae"]
    )


@pytest.mark.parametrize(("name", "plain"), [("sd3", False), ("sana", False), ("flux", True), ("sd3", True)])
def test_names_without_a_prefix(
    name: str, plain: bool, tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GGUF of Stable Diffusion 3.5 has them, some of which Pyramid-Flow has too."""
    facts_of(name, folder := tiny_folders(name), tmp_path / "facts")
    monkeypatch.setattr(published, "FACTS", tmp_path / "facts")
    given = files_of(name, folder, tmp_path)
    given["path"] = transformer_file(name, folder, given["path"], plain=plain)
    assert ballast.open_pipeline(device="cpu", **given).folder.name == name
    if not plain:
        assert "Give base as well" in refusal({"path": given["path"]})


def test_how_names_tell_a_model_is_said_in_words(tiny_folders: Folders, tmp_path: Path) -> None:
    """Patterns are for us to read."""
    for name in ("ltx", "zimage", "qwenimage"):
        path = transformer_file(name, tiny_folders(name), tmp_path / "model.safetensors")
        assert not set("\\|^$*?[") & set(refusal({"path": path}).partition("these are")[2])


def test_settings_of_a_tokenizer_count(flux: dict[str, Any], tmp_path: Path) -> None:
    """Stable Diffusion 3 pads the prompt of one encoder otherwise; the embeddings of both have keys of their own."""
    path = tmp_path / "facts" / "models" / "flux" / "model_index.json"
    index = json.loads(path.read_text("utf-8"))
    found = []
    for settings in ({}, {"pad_token": "!", "model_max_length": 9}):
        index["_tokenizers"]["tokenizer"] = ["clip", settings]
        path.write_text(json.dumps(index), "utf-8")
        pipe = ballast.open_pipeline(**{"device": "cpu", **flux})
        found.append((pipe.model.components["tokenizer"].create(), pipe.model.components["tokenizer"].identity()))
    assert found[1][0].pad_token == "!" != found[0][0].pad_token and found[1][0].model_max_length == 9
    assert found[0][1] != found[1][1]


# The configs that come with the pack


# What files of the models are called, and a name that files of the same sizes have that are of another model.
NAMES = {
    "Chroma": ("Chroma1-HD-Q8_0", "Chroma1-Flash"),
    "FLUX.1-dev": ("flux1-dev-Q4_K_S", "flux1-kontext-dev"),
    "FLUX.1-Kontext-dev": ("flux1-dev-kontext_fp8_scaled", "flux1-dev"),
    "FLUX.1-Fill-dev": ("flux1-fill-dev-Q8_0", ""),
    "FLUX.1-schnell": ("flux1-schnell", ""),
    "AuraFlow": ("aura_flow_0.3", ""),
    "FLUX.2-klein-4B": ("flux-2-klein-4b-fp8", "flux-2-klein-base-4b"),
    "FLUX.2-klein-9B": ("flux-2-klein-9b", "flux-2-klein-base-9b"),
    "FLUX.2-klein-base-4B": ("flux-2-klein-base-4b", "flux-2-klein-4b"),
    "FLUX.2-klein-base-9B": ("flux-2-klein-base-9b-Q8_0", "flux-2-klein-9b"),
    "HiDream-I1-Dev": ("hidream_i1_dev_bf16", "hidream_i1_full_fp8"),
    "HiDream-I1-Fast": ("hidream_i1_fast_bf16", "hidream_e1"),
    "HiDream-I1-Full": ("hidream_i1_full_fp8", "hidream_i1_dev_bf16"),
    "HunyuanVideo": ("hunyuan_video_t2v_720p_bf16", "hunyuan_video_v2_replace_image_to_video_720p_bf16"),
    "LTX-Video-0.9": ("ltx-video-2b-v0.9", "ltx-video-2b-v0.9.1"),
    "LTX-Video-0.9.1": ("ltx-video-2b-v0.9.1", "ltx-video-2b-v0.9"),
    "LTX-Video-0.9.5": ("ltx-video-2b-v0.9.5", "ltxv-2b-0.9.6-dev"),
    "LTX-Video-0.9.7-13B": ("ltxv-13b-0.9.7-dev-fp8", "ltxv-13b-0.9.7-distilled"),
    "Lumina-Image-2.0": ("lumina_2_model_bf16", ""),
    "Qwen-Image": ("qwen_image_fp8_e4m3fn", "qwen_image_edit_2509_fp8_e4m3fn"),
    "Qwen-Image-Edit": ("qwen_image_edit_fp8_e4m3fn", "qwen_image_edit_2512_bf16"),
    "Qwen-Image-Edit-2509": ("Qwen-Image-Edit-2509-Q4_K_M", "qwen_image_edit_fp8_e4m3fn"),
    "Qwen-Image-Edit-2511": ("qwen_image_edit_2511_int8_convrot", "qwen_image_edit_2509_fp8_e4m3fn"),
    "Sana-1.6B": ("Sana_1600M_1024px", "Sana_1600M_4Kpx_BF16"),
    "stable-diffusion-3.5": ("sd3.5_large-Q4_0", ""),
    "Wan2.1-FLF2V-720P": ("wan2.1_flf2v_720p_14B_fp16", ""),
    "Wan2.1-I2V-480P": ("wan2.1_i2v_480p_14B_fp16", "wan2.1_i2v_720p_14B_fp16"),
    "Wan2.1-I2V-720P": ("wan2.1-i2v-14b-720p-Q4_K_M", "Wan2.1-I2V-14B-480P"),
    "Wan2.1-T2V": ("wan2.1_t2v_1.3B_fp16", "wan2.2_t2v_high_noise_14B_fp8_scaled"),
    "Wan2.2-I2V-A14B": ("wan2.2_i2v_high_noise_14B_fp8_scaled", ""),
    "Wan2.2-T2V-A14B": ("wan2.2_t2v_high_noise_14B_fp8_scaled", ""),
    "Z-Image": ("z_image_bf16", "z_image_turbo_bf16"),
    "Z-Image-Turbo": ("z_image_turbo_bf16", "z_image_bf16"),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_model_is_known_by_its_file(name: str, tmp_path: Path) -> None:
    """Of a file with the model's own widths and one layer, which has no bytes."""
    folder, (stem, other) = SHIPPED / "models" / name, NAMES[name]
    index = read_model_index(folder)
    cls: Any = component_class(*index["transformer"])
    config = {key: value for key, value in cls.load_config(folder / "transformer").items() if not key.startswith("_")}
    layers = [key for key in inspect.signature(cls.__init__).parameters if re.fullmatch("n(um)?_.*layers", key)]
    module = full_size.empty(cls, config | dict.fromkeys(layers, 1))
    path = tmp_path / f"{stem}.safetensors"
    full_size._write_sparse(path, {key: tensor.to(torch.bfloat16) for key, tensor in module.named_parameters()})
    second = path if index["_file"].get("two") else None
    assert GivenFiles(path, transformer_2=second).published() == folder
    path = path.rename(tmp_path / f"{other or stem}.safetensors")
    found = [
        published_or_none(GivenFiles(path, transformer_2=each)) for each in ({None, path} if not other else {None})
    ]
    assert (folder in found) == (not other)
    assert len(set(found)) == len(found)


def published_or_none(files: GivenFiles) -> Path | None:
    try:
        return files.published()
    except ValueError:
        return None


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_what_its_pipeline_takes(name: str) -> None:
    """Classes that there are, schedulers of their config, and a kind for each tokenizer."""
    folder = SHIPPED / "models" / name
    index = read_model_index(folder)
    expected = getattr(diffusers, index["_class_name"]).__init__.__annotations__.keys()
    parts = {key for key in index if not key.startswith("_") and key not in ("boundary_ratio", "is_distilled")}
    assert parts <= expected
    for key in parts - {key for key in parts if None in index[key]}:
        cls = component_class(*index[key])
        apart = {**index["_parts"], **index.get("_processors", {})}
        where = {k: SHIPPED / "parts" / p for k, (p, _) in apart.items()}.get(key, folder / key)
        assert key in index["_tokenizers"] or where.is_dir(), key
        if key == "scheduler":
            config = json.loads((where / "scheduler_config.json").read_text("utf-8"))
            made = cls.from_pretrained(where)
            assert all(made.config[field] == value for field, value in config.items() if not field.startswith("_"))
    assert {reader for _, reader in index.get("_processors", {}).values()} <= index["_tokenizers"].keys()
    assert {kind for kind, _ in index["_tokenizers"].values()} <= published.KINDS.keys()


PUBLISHED = {
    "clip_l": ("flux", "text_encoder"),
    "clip_l_long": ("hidream", "text_encoder"),
    "clip_g_long": ("hidream", "text_encoder_2"),
    "t5_xxl": ("flux", "text_encoder_2"),
    "flux_vae": ("flux", "vae"),
    "umt5_xxl": ("wan", "text_encoder"),
    "wan_vae": ("wan", "vae"),
    "qwen2_5_vl_7b": ("qwenimage", "text_encoder"),
    "qwen2_5_vl_7b_seeing": ("qwenimage", "text_encoder"),
    "qwen_vae": ("qwenimage", "vae"),
}


@pytest.mark.parametrize("part", PUBLISHED)
def test_parts_are_those_that_were_published(part: str, tmp_path: Path) -> None:
    """Against the published sizes that plans are tested with, and in what a config says beside sizes."""
    family, key = PUBLISHED[part]
    pipe: Any = tiny.FAMILIES[family].build()
    cls, sizes = type(getattr(pipe, key)), full_size.PARTS[family][key]
    if part == "qwen2_5_vl_7b":  # the model of text alone
        cls, sizes = transformers.Qwen2_5_VLTextModel, sizes["text_config"]
    if part == "qwen2_5_vl_7b_seeing":  # without a head
        cls = transformers.Qwen2_5_VLModel
    expected = full_size.empty(cls, sizes)
    found = Component(key, SHIPPED / "parts" / part, cls, torch.bfloat16)
    with full_size.init_empty_weights(include_buffers=False):
        module: Any = found._structure()
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    assert shapes(module) == shapes(expected)
    own, theirs = (each.config.to_dict() if hasattr(each.config, "to_dict") else dict(each.config) for each in
                   (module, expected))  # fmt: skip
    assert told(own) == told(theirs)


SAID = re.compile(
    "hidden_act|feed_forward|heads|eps$|theta|mrope|rope_type|relative|tie_word|scaling_factor|shift_factor|latents_|"
    "temperal|fullatt|window_size|groups|merge|patch|block_types|bos_token|eos_token"
)


def told(config: Any, name: str = "") -> dict[str, Any]:
    """What a config says beside sizes, which weights have, by the names of its values."""
    if isinstance(config, dict):
        return {k: v for key, value in config.items() for k, v in told(value, f"{name}.{key}").items()}
    return {name: list(config) if isinstance(config, tuple) else config} if SAID.search(name) else {}


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
