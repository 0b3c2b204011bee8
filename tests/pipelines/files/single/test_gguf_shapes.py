"""GGUF files whose tensors lost sizes of 1, or have folded kernels, or more dimensions than ggml knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import gguf
import pytest
import tiny
import torch
from ballast.pipelines.files.components import read_components, read_model_index
from ballast.pipelines.files.single.given import GivenFiles
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.torch import save_file
from selection import few
from single_files import base_of, state_of
from single_files.original_names import original, original_wan_vae

Folders = Callable[[str], Path]
State = dict[str, torch.Tensor]
ORIG_SHAPE = "comfy.gguf.orig_shape."


def write(at: Path, weights: State, kinds: dict[str, Type] | None = None, noted: State | None = None) -> Path:
    """Write the tensors in float32, or those of `kinds` so; the shapes of the `noted` ones become facts."""
    writer = gguf.GGUFWriter(at, "any")
    for name, value in (noted or {}).items():
        writer.add_array(ORIG_SHAPE + name, list(value.shape))
    for name, value in weights.items():
        kind = (kinds or {}).get(name)
        values = value.float().numpy()
        packed = values if kind is None else quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return at


def as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def first_folded(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(0, 1) if value.ndim > 3 else value


def in_two(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(1) if value.ndim > 3 else value


def without_ones(value: torch.Tensor) -> torch.Tensor:
    return value.squeeze()


def leading_ones_lost(value: torch.Tensor) -> torch.Tensor:
    while value.ndim > 1 and value.shape[0] == 1:
        value = value[0]
    return value


CHANGES = [as_it_is, first_folded, in_two, without_ones, leading_ones_lost]


def latents(name: str, path: Path, base: Path, device: str = "cpu", **settings: Any) -> torch.Tensor:
    _, encode, sample, _ = tiny.stages(name, path, device, base=base, cache_dir=path.parent / "cache", **settings)
    return sample(encode()).float()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", few(["wan", "hunyuan_video", "sd3", "zimage", "sana"], "wan"))
def test_latents_are_those_of_the_plain_file(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], tiny_folders: Folders, tmp_path: Path
) -> None:
    folder = tiny_folders(name)
    whole = original(name, state_of(folder))
    changed = {key: change(value) for key, value in whole.items()}
    if change is not as_it_is and all(changed[key].shape == whole[key].shape for key in whole):
        pytest.skip("it has no such tensors")
    base = base_of(folder, tmp_path / "base")
    save_file({key: value.contiguous() for key, value in whole.items()}, tmp_path / "plain.safetensors")
    expected = latents(name, tmp_path / "plain.safetensors", base)
    assert torch.equal(latents(name, write(tmp_path / "m.gguf", changed), base), expected)


@pytest.mark.parametrize("kind", few([Type.Q8_0, Type.Q4_0, Type.F16], Type.Q4_0))
@pytest.mark.parametrize("how", few(["in two", "noted"], "in two"))
def test_quantized_kernels_are_decoded_on_the_device(
    kind: Type, how: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """As the plain file of the decoded values; noted, as rows of 32 that are no rows of the kernel."""
    folder, key = tiny_folders("wan"), "patch_embedding.weight"
    whole = original("wan", state_of(folder))
    flat = whole[key].flatten(1) if how == "in two" else whole[key].reshape(-1, 32)
    decoded = quants.dequantize(quants.quantize(flat.numpy(), kind), kind)
    plain = whole | {key: torch.from_numpy(decoded).view(whole[key].shape)}
    save_file({name: value.contiguous() for name, value in plain.items()}, tmp_path / "plain.safetensors")
    base = base_of(folder, tmp_path / "base")
    expected = latents("wan", tmp_path / "plain.safetensors", base, dtype="float32")
    noted = {} if how == "in two" else {key: whole[key]}
    path = write(tmp_path / "m.gguf", whole | {key: flat}, {key: kind}, noted)
    for strategy in ("resident", "streamed", "leafwise"):
        pipe, encode, sample, _ = tiny.stages("wan", path, "sim", base=base, dtype="float32", cache_dir=tmp_path)
        made = sample(encode(), strategy=strategy).float()
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
        del pipe
        assert sim.stats().allocated_bytes == 0


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("patch_embedding.weight", lambda value: value.reshape(8, -1)),
        ("patch_embedding.weight", lambda value: value.flatten(1).T),
        ("blocks.0.modulation", lambda value: value.reshape(3, -1)),
        ("blocks.0.ffn.0.weight", lambda value: value.T),
        ("blocks.0.ffn.0.weight", lambda value: value.flatten()),
    ],
)
def test_other_shapes_of_as_many_numbers_are_refused(
    key: str, change: Callable[[torch.Tensor], torch.Tensor], tiny_folders: Folders, tmp_path: Path
) -> None:
    folder = tiny_folders("wan")
    whole = original("wan", state_of(folder))
    path = write(tmp_path / "m.gguf", whole | {key: change(whole[key]).contiguous()})
    with pytest.raises(ValueError, match="another|no whole") as caught:
        latents("wan", path, base_of(folder, tmp_path / "base"))
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [as_it_is, first_folded, without_ones])
def test_vae_of_wan(change: Callable[[torch.Tensor], torch.Tensor], tiny_folders: Folders, tmp_path: Path) -> None:
    """Its kernels have five dimensions, and its norms sizes of 1 behind."""
    base = base_of(tiny_folders("wan"), tmp_path / "base", "vae")
    sizes: Any = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    vae: Any = diffusers.AutoencoderKLWan(**sizes, temperal_downsample=[False, True, True], latents_mean=[0.0] * 4)
    state = vae.state_dict()
    (base / "vae" / "config.json").write_text(vae.to_json_string(), "utf-8")
    path = write(tmp_path / "vae.gguf", {key: change(value) for key, value in original_wan_vae(state).items()})
    index = {"vae": read_model_index(base)["vae"]}
    unit = read_components(base, index, None, None, GivenFiles(path, vae=path).components(index))["vae"].unit("")
    unit.load()
    made = unit.module.state_dict()
    assert made.keys() == state.keys()
    assert all(torch.equal(made[key], value) for key, value in state.items())
    assert unit.source() is not None  # it streams from the file too


@pytest.mark.parametrize("kind", [None, Type.Q8_0])
def test_a_folder_of_gguf(kind: Type | None, tiny_folders: Folders, tmp_path: Path) -> None:
    """By diffusers' own names, in place of the safetensors file; a transposed matrix is refused there too."""
    folder = tiny_folders("wan")
    copy = base_of(folder, tmp_path / "copy")
    state = state_of(folder)
    key = "patch_embedding.weight"
    flat = {name: in_two(without_ones(value)) for name, value in state.items()}
    path = write(copy / "transformer" / "m.gguf", flat, {key: kind} if kind else {})
    changed = dict(state)
    if kind:
        packed = quants.dequantize(quants.quantize(flat[key].numpy(), kind), kind)
        changed[key] = torch.from_numpy(packed).view(state[key].shape)
    plain = base_of(folder, tmp_path / "plain")
    save_file(changed, plain / "transformer" / "diffusion_pytorch_model.safetensors")
    found = []
    for each in (plain, copy):
        _, encode, sample, _ = tiny.stages("wan", each, "cpu", dtype="float32", cache_dir=tmp_path / "cache")
        found.append(sample(encode()))
    assert torch.equal(*found)
    path.unlink()
    turned = "blocks.0.ffn.net.0.proj.weight"
    write(copy / "transformer" / "m.gguf", flat | {turned: flat[turned].T.contiguous()}, {turned: kind} if kind else {})
    with pytest.raises(ValueError, match=r"does not fit its config.json: blocks\.0\.ffn") as caught:
        _, encode, sample, _ = tiny.stages("wan", copy, "cpu", dtype="float32", cache_dir=tmp_path / "cache")
        sample(encode())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin2", "model"])
def test_gguf_by_another_name(name: str, tiny_folders: Folders, tmp_path: Path) -> None:
    """Files that were renamed are told by their first bytes, encoders as well."""
    folder, base = tiny_folders("flux"), base_of(tiny_folders("flux"), tmp_path / "base")
    path = write(tmp_path / "flux.gguf", original("flux", state_of(folder))).rename(tmp_path / name)
    encoder = write(tmp_path / "t5.gguf", state_of(folder, "text_encoder_2")).rename(tmp_path / f"t5_{name}")
    index = {part: read_model_index(base)[part] for part in ("transformer", "text_encoder_2")}
    found = read_components(base, index, None, None, GivenFiles(path, (encoder,)).components(index))
    for part in index:
        (unit := found[part].unit("")).load()
        state = unit.module.state_dict()
        assert all(torch.equal(state[key], value) for key, value in state_of(folder, part).items())
