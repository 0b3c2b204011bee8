"""Files that are no such file: one line says what it is, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import manager
from safetensors.torch import save_file
from single_files import base_of, state_of, transformer_file
from single_files.newer_models import NEWER

Folders = Callable[[str], Path]
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_folders: Folders) -> Path:
    return base_of(tiny_folders("flux"), tmp_path_factory.mktemp("base") / "flux")


def refusal(path: Path, error: type[Exception] = ValueError, **options: object) -> str:
    before = len(manager("cpu").units())
    with pytest.raises(error) as caught:
        ballast.open_pipeline(path, device="cpu", **options)
    assert "\n" not in str(caught.value)
    assert len(manager("cpu").units()) == before
    return str(caught.value)


def flux(folder: Path, at: Path, change: Callable[[State], State], plain: bool = False) -> Path:
    return transformer_file("flux", folder, at / "flux.safetensors", plain=plain, change=change)


def without(name: str) -> Callable[[State], State]:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def test_a_file_alone(tiny_folders: Folders, tmp_path: Path) -> None:
    path = flux(tiny_folders("flux"), tmp_path, dict)
    said = refusal(path)
    assert str(path) in said and "Give base" in said


def test_a_file_that_is_not_there(base: Path, tmp_path: Path) -> None:
    assert "there is no file" in refusal(tmp_path / "gone.safetensors", FileNotFoundError, base=base)


def test_a_folder_with_a_base(base: Path, tiny_folders: Folders) -> None:
    assert "Leave base out" in refusal(tiny_folders("flux"), base=base)


def test_a_base_that_is_none(tiny_folders: Folders, tmp_path: Path) -> None:
    path = flux(tiny_folders("flux"), tmp_path, dict)
    assert "model_index.json" in refusal(path, FileNotFoundError, base=tmp_path)


def test_a_base_of_a_family_with_files_of_its_own(tiny_folders: Folders, tmp_path: Path) -> None:
    path = flux(tiny_folders("flux"), tmp_path, dict)
    (newbie := tmp_path / "newbie").mkdir()
    (newbie / "model_index.json").write_text('{"_class_name": "NewbiePipeline"}', "utf-8")
    said = refusal(path, base=newbie)
    assert "NewbiePipeline" in said and "no base for" in said


@pytest.mark.parametrize(("name", "kind"), [("wan", "WanT"), ("qwenimage", "QwenImageT"), ("hidream", "HiDreamImageT")])
def test_a_base_of_another_model_is_told_before_its_encoders_are_asked_for(
    name: str, kind: str, tiny_folders: Folders, tmp_path: Path
) -> None:
    path = flux(tiny_folders("flux"), tmp_path, dict)
    (encoder := tmp_path / "clip_l.safetensors").write_bytes(b"")
    said = refusal(path, base=(other := tiny_folders(name)), text_encoders=[encoder])
    assert said.startswith(f"{path} is FLUX.1, but {other} has {kind}ransformer") and said.count(". ") == 1


def test_a_base_without_its_config(tiny_folders: Folders, tmp_path: Path) -> None:
    path = flux(tiny_folders("flux"), tmp_path, dict)
    bare = base_of(tiny_folders("flux"), tmp_path / "bare")
    (bare / "transformer" / "config.json").unlink()
    assert "config.json" in refusal(path, FileNotFoundError, base=bare)


@pytest.mark.parametrize("start", [b"PK\x03\x04" + b"\0" * 60, b"\x80\x04" + b"\0" * 60])
def test_a_pickle(start: bytes, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(start)
    assert "pickle" in refusal(path, base=base)


@pytest.mark.parametrize("length", [0, 7, 5000])
def test_a_file_that_is_cut_short(length: int, base: Path, tiny_folders: Folders, tmp_path: Path) -> None:
    path = flux(tiny_folders("flux"), tmp_path, dict)
    path.write_bytes(path.read_bytes()[:length])
    assert "Download it again" in refusal(path, base=base)


def test_an_unknown_model(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"down.0.weight": torch.zeros(2, 2)}, path)
    said = refusal(path, base=base)
    assert "down.0.weight" in said and "FLUX.1" in said and str(path) in said


@pytest.mark.parametrize("other", ["sd3", "wan", "qwenimage", "hidream"])
def test_another_model_than_the_base(other: str, base: Path, tiny_folders: Folders, tmp_path: Path) -> None:
    path = transformer_file(other, tiny_folders(other), tmp_path / "model.safetensors")
    said = refusal(path, base=base)
    assert "FluxTransformer2DModel" in said and str(path) in said and str(base) in said


def test_scaled_fp8_that_lacks_a_scale(base: Path, tiny_folders: Folders, tmp_path: Path) -> None:
    """One line names the tensor; the same weights without the mark are fp8 that was cast, and open."""
    fp8 = torch.float8_e4m3fn

    def cast(state: State) -> State:
        return {name: tensor.to(fp8) if tensor.ndim == 2 else tensor for name, tensor in state.items()}

    def marked(state: State) -> State:
        return cast(state) | {"scaled_fp8": torch.zeros(2).to(fp8)}

    path = transformer_file("flux", tiny_folders("flux"), tmp_path / "marked.safetensors", change=marked)
    said = refusal(path, base=base)
    assert said.startswith(f"{path}: ") and ".weight_scale is missing" in said and "Download the file again" in said
    path = transformer_file("flux", tiny_folders("flux"), tmp_path / "cast.safetensors", change=cast)
    assert ballast.open_pipeline(path, base=base, device="cpu").denoisers


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ("double_blocks.1.img_mlp.0.bias", "transformer_blocks.1.ff.net.0.proj.bias"),
        ("single_blocks.2.linear1.weight", "single_transformer_blocks.2.proj_mlp.weight"),
        ("final_layer.adaLN_modulation.1.weight", "norm_out.linear.weight"),
        ("img_in.weight", "x_embedder.weight"),
    ],
)
def test_a_weight_that_is_missing(
    names: tuple[str, str], plain: bool, base: Path, tiny_folders: Folders, tmp_path: Path
) -> None:
    path = flux(tiny_folders("flux"), tmp_path, without(names[plain]), plain)
    said = refusal(path, base=base)
    assert names[plain] in said and "Get the whole model" in said


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["lora_A.weight", "double_blocks.0.img_attn.extra.weight", "double_blocks.9.weight"])
def test_a_weight_that_is_left_over(name: str, plain: bool, base: Path, tiny_folders: Folders, tmp_path: Path) -> None:
    path = flux(tiny_folders("flux"), tmp_path, lambda state: state | {name: torch.zeros(4, 4)}, plain)
    said = refusal(path, base=base)
    assert str(path) in said and ("no place for" in said or "lacks" in said)


def test_a_weight_of_another_shape(base: Path, tiny_folders: Folders, tmp_path: Path) -> None:
    name = "double_blocks.1.img_mlp.0.bias"
    path = flux(tiny_folders("flux"), tmp_path, lambda state: state | {name: torch.zeros(100)})
    said = refusal(path, base=base)
    assert "transformer_blocks.1.ff.net.0.proj.bias as [100]" in said and str(path) in said


def test_a_joined_weight_of_other_rows(base: Path, tiny_folders: Folders, tmp_path: Path) -> None:
    name = "double_blocks.1.img_attn.qkv.weight"
    path = flux(tiny_folders("flux"), tmp_path, lambda state: state | {name: torch.zeros(97, 32)})
    assert "97 rows" in refusal(path, base=base)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_whole_numbers_of_which_nothing_is_told(
    dtype: torch.dtype, base: Path, tiny_folders: Folders, tmp_path: Path
) -> None:
    def change(state: State) -> State:
        return state | {"img_in.weight": state["img_in.weight"].to(dtype)}

    said = refusal(flux(tiny_folders("flux"), tmp_path, change), base=base)
    assert "img_in.weight" in said


def test_what_else_a_file_holds_is_told(
    base: Path, tiny_folders: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of a whole pipeline: its transformer is read, and a line says that the rest is not."""

    def change(state: State) -> State:
        named = {f"model.diffusion_model.{name}": tensor for name, tensor in state.items()}
        return named | {"first_stage_model.a": torch.zeros(1), "text_encoders.b": torch.zeros(1)}

    path = flux(tiny_folders("flux"), tmp_path, change)
    with caplog.at_level("INFO", "ballast"):
        ballast.open_pipeline(path, device="cpu", base=base)
    assert "first_stage_model, text_encoders" in caplog.text


def test_names_that_no_table_of_ours_has(tiny_folders: Folders, tmp_path: Path) -> None:
    """diffusers has no converter for HunyuanVideo 1.5; ours refuses what it does not know, and names it."""
    folder, path = tiny_folders("hunyuan_video15"), tmp_path / "hunyuanvideo1.5_720p_t2v_fp16.safetensors"
    base, state = base_of(folder, tmp_path / "base"), state_of(folder)
    known = {name: tensor.contiguous() for name, tensor in NEWER["hunyuan_video15"].original(state).items()}
    for name, said in (
        ("double_blocks.0.img_attn_extra.weight", "no place for, such as double_blocks.0.img_attn_extra.weight"),
        ("double_blocks.7.img_attn_qkv.weight", "lacks"),
    ):
        save_file(known | {name: torch.zeros(6, 4)}, path)
        assert said in refusal(path, base=base)
    save_file({name: tensor for name, tensor in known.items() if "img_in" not in name}, path)
    assert "img_in.proj" in refusal(path, base=base) or "x_embedder.proj" in refusal(path, base=base)
    save_file(known, path)
    pipe: Any = ballast.open_pipeline(path, device="cpu", base=base)
    unit = pipe.model.components["transformer"].unit("")
    unit.load()
    assert all(torch.equal(unit.module.state_dict()[name], tensor) for name, tensor in state.items())


def test_a_file_that_changes_after_it_was_opened(base: Path, tiny_folders: Folders, tmp_path: Path) -> None:
    path = flux(tiny_folders("flux"), tmp_path, dict)
    pipe = ballast.open_pipeline(path, device="cpu", base=base)
    cond = pipe.encode("a boat", "", max_sequence_length=16)
    flux(tiny_folders("flux"), tmp_path, lambda state: {name: 2 * tensor for name, tensor in state.items()})
    with pytest.raises(ValueError, match="was changed since"):
        pipe.sample(cond, width=32, height=32, steps=1)
