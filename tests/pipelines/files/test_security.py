"""Files of strangers: what could run code, or lead elsewhere, or claims to be huge, is refused in one line."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ballast
import folder_paths
import pytest
import torch
from ballast.memory import files, manager
from ballast.nodes.load import LoadPipeline
from ballast.nodes.load_newbie import LoadNewbie
from ballast.nodes.shared.folders import find_llamas, find_pipelines
from hidream_folders import published
from newbie_folders import official

Folders = Callable[[str], Path]
INDEX = "diffusion_pytorch_model.safetensors.index.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def model(tiny_folders: Folders, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(tiny_folders("lumina2"), tmp_path / "model")
    manager("cpu").timeline.clear()  # it keeps so many stages, which other tests count


def refusal(run: Callable[[], Any], *kinds: type[Exception]) -> str:
    """The one line that a call is refused with."""
    started = time.process_time()
    with pytest.raises(kinds or ValueError) as caught:
        run()
    assert "\n" not in str(caught.value)
    assert time.process_time() - started < 10
    return str(caught.value)


def whole_run(folder: Path) -> Callable[[], Any]:
    """Open a pipeline and draw with it: all that is ever read of a folder is read."""

    def run() -> Any:
        pipe = ballast.open_pipeline(folder, device="cpu")
        return pipe.decode(pipe.sample(pipe.encode("a boat"), width=48, height=32, steps=1))

    return run


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


# Pickles


@pytest.mark.parametrize("way", ["torch", "legacy", "plain"])
@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "model.pt", "model.ckpt", "a.PTH", WEIGHTS])
def test_pickles_are_refused_whatever_their_name(model: Path, name: str, way: str) -> None:
    mark = model / "ran"
    (model / "transformer" / WEIGHTS).unlink()
    path = model / "transformer" / name
    if way == "plain":
        path.write_bytes(pickle.dumps({"a": Touch(mark)}))
    else:
        torch.save({"a": Touch(mark)}, path, _use_new_zipfile_serialization=way == "torch")
    message = refusal(whole_run(model))
    assert "pickle" in message
    assert str(path) in message
    assert not mark.exists()


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    "name",
    ["diffusion_pytorch_model-00001-of-00001.bin", "../vae/a.safetensors", "/etc/a.safetensors", "a.gguf", "", "..",
     ".hidden.safetensors", "a\nb.safetensors", "c:\\a.safetensors", 3, None, ["a"]],
)  # fmt: skip
def test_index_that_names_no_safetensors_file_beside_it(model: Path, name: Any, beside: bool) -> None:
    folder = model / "transformer"
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    torch.save({"a": Touch(model / "ran")}, folder / "diffusion_pytorch_model-00001-of-00001.bin")
    if not beside:
        (folder / WEIGHTS).unlink()
    assert str(folder) in refusal(whole_run(model))
    assert not (model / "ran").exists()


def test_single_file_that_is_a_pickle(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "newbie.ckpt")
    assert "pickle" in refusal(lambda: ballast.open_pipeline(tmp_path / "newbie.ckpt", device="cpu"))


# Code


def test_code_in_a_model_folder_is_never_run(model: Path) -> None:
    mark = model / "ran"
    for folder in (model, *(path for path in model.iterdir() if path.is_dir())):
        for name in ("pipeline.py", "modeling_custom.py", "tokenization_custom.py", "__init__.py"):
            (folder / name).write_text(f"open({str(mark)!r}, 'w')\nclass Custom: pass\n")
        for config in folder.glob("*config.json"):
            auto = {"AutoModel": "modeling_custom.Custom", "AutoTokenizer": ["tokenization_custom.Custom", None]}
            edit(config, auto_map=auto, trust_remote_code=True)
    assert whole_run(model)().isfinite().all()
    assert not mark.exists()


@pytest.mark.parametrize("entry", [["pipeline", "Custom"], ["transformers", "AutoModel"], ["diffusers", "AutoModel"]])
def test_model_that_needs_its_own_code(model: Path, entry: list[str]) -> None:
    (model / "transformer" / "pipeline.py").write_text("class Custom: pass\n")
    edit(model / "model_index.json", transformer=entry)
    assert entry[1] in refusal(whole_run(model))


def test_tokenizer_that_needs_its_own_code(model: Path) -> None:
    edit(model / "model_index.json", tokenizer=["transformers", "AutoTokenizer"])
    (model / "tokenizer" / "custom.py").write_text("class Custom: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["custom.Custom", None]}, "tokenizer_class": "Custom"}
    (model / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    assert "custom code" in refusal(whole_run(model))


@pytest.mark.parametrize("value", ["stranger/kernel", {"": "stranger/kernel:run"}])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_from_a_repository(model: Path, key: str, value: Any) -> None:
    edit(model / "text_encoder" / "config.json", **{key: value})
    assert "code of its own" in refusal(whole_run(model))


def test_adapter_of_a_model_elsewhere(model: Path) -> None:
    (model / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "/other"}')
    assert "adapter" in refusal(whole_run(model))


# Classes


@pytest.mark.parametrize("part", ["transformer", "tokenizer", "scheduler", "vae"])
@pytest.mark.parametrize(
    "entry",
    [["os", "system"], ["builtins", "eval"], ["diffusers.models", "AutoencoderKL"], ["diffusers", "FluxPipeline"],
     ["transformers", "Trainer"], ["diffusers", "DiffusionPipeline"], ["transformers", "pipeline"],
     ["diffusers", "models.AutoencoderKL"], ["diffusers", "_LazyModule"], ["__class__", "mro"],
     ["pipeline_utils", "os"],
     ["transformers", "PretrainedConfig"], ["diffusers", "BitsAndBytesConfig"], [["os"], "system"], ["diffusers", 3],
     ["diffusers", "a\nb"], [{"a": 1}, {"b": 2}]],
)  # fmt: skip
def test_class_that_is_no_part_of_a_pipeline(model: Path, part: str, entry: list[Any]) -> None:
    edit(model / "model_index.json", **{part: entry})
    assert "model_index.json" in refusal(whole_run(model))


@pytest.mark.parametrize(
    "name",
    ["os", "_LazyModule", "pipelines.FluxPipeline", "ModelMixin", "DiffusionPipeline", "PyramidFlow", "", "a\nb"],
)
def test_pipeline_class_that_is_none(model: Path, name: str) -> None:
    edit(model / "model_index.json", _class_name=name)
    refusal(whole_run(model), ValueError, FileNotFoundError)


@pytest.mark.parametrize("entry", ["AutoencoderKL", None, {}, 3, [None, None], ["diffusers"]])
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "scheduler", "vae"])
def test_component_without_a_class(model: Path, part: str, entry: Any) -> None:
    edit(model / "model_index.json", **{part: entry})
    refusal(whole_run(model))


# Names and paths


@pytest.mark.parametrize("name", ["../vae", "/etc", "a/b", "..", "a\\b", "vae\n", "c:"])
def test_component_names_are_no_paths(model: Path, name: str) -> None:
    edit(model / "model_index.json", **{name: ["diffusers", "AutoencoderKL"]})
    assert "no folder name" in refusal(whole_run(model))


@pytest.mark.parametrize("name", ["../../secret", "/etc", "..", ".", "", "sub/../../secret", "~", "a\0b"])
def test_names_in_node_inputs_are_no_paths(name: str) -> None:
    given = {"vram_gb": 0.0, "dtype": "auto", "keep_loaded": True, "device": "cpu"}
    secret = Path(folder_paths.base_path) / "secret"
    secret.mkdir(exist_ok=True)
    (secret / "a.safetensors").write_bytes(b"")
    message = refusal(lambda: LoadPipeline.execute(pipeline=name, **given))
    assert "not in models/diffusers" in message
    demo = next(iter(find_pipelines()))
    assert "not in models/text_encoders" in refusal(lambda: LoadPipeline.execute(pipeline=demo, llama=name, **given))
    assert LoadPipeline.fingerprint_inputs(pipeline=name, llama=name)
    inputs = dict.fromkeys(("diffusion_model", "gemma", "jina", "vae"), f"{name}/a.safetensors")
    refusal(lambda: LoadNewbie.execute(**inputs, **given), FileNotFoundError, ValueError)


@pytest.mark.parametrize("content", ['{"a":' * 100_000, "[" * 100_000, "\0", "3", "{}"], ids=range(5))
def test_damaged_folder_does_not_hide_the_others(content: str) -> None:
    roots = [Path(folder_paths.get_folder_paths(kind)[0]) for kind in ("diffusers", "text_encoders")]
    for root in roots:
        (root / "damaged").mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model_index.json"):
            (root / "damaged" / name).write_text(content)
    try:
        assert len(find_pipelines()) >= 1
        assert "damaged" not in find_llamas()
    finally:
        for root in roots:
            shutil.rmtree(root / "damaged")


@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "spm_file"])
def test_tokenizer_file_elsewhere(model: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "secret.json").write_text("{}")
    for secret in (str(tmp_path / "secret.json"), "../../secret.json"):
        edit(model / "tokenizer" / "tokenizer_config.json", **{key: secret})
        assert "secret.json" in refusal(whole_run(model))


def test_tokenizer_file_where_it_lay_when_it_was_saved(model: Path, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone" / "special_tokens_map.json")
    edit(model / "tokenizer" / "tokenizer_config.json", special_tokens_map_file=gone)
    assert whole_run(model)().isfinite().all()


# Links


def moved(path: Path, to: Path) -> None:
    """Put a file or folder elsewhere, with a link to it in its place."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, to)
    path.symlink_to(to, target_is_directory=to.is_dir())


LINKED = ["model_index.json", "transformer", "tokenizer", f"transformer/{WEIGHTS}", "vae/config.json",
          "tokenizer/tokenizer.json", "scheduler/scheduler_config.json"]  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_link_out_of_a_model_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    moved(model / name, tmp_path / "elsewhere" / Path(name).name)
    message = refusal(whole_run(model))
    assert "elsewhere" in message
    assert str(model / name) in message


@pytest.mark.parametrize("name", LINKED)
def test_links_to_the_hosts_own_models_and_within_one(
    model: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved(model / name, tmp_path / "models" / Path(name).name)
    moved(model / "vae", model / "parts" / "vae")
    monkeypatch.setattr(files, "model_roots", {tmp_path / "models"})
    assert whole_run(model)().isfinite().all()


def test_model_that_is_a_link_behind_a_link(model: Path, tmp_path: Path) -> None:
    moved(model, tmp_path / "disk" / "big" / "model")
    (tmp_path / "models").symlink_to(tmp_path)
    assert whole_run(tmp_path / "models" / "model")().isfinite().all()


@pytest.mark.parametrize("local", [True, False])
def test_download_cache_of_links_to_blobs(model: Path, tmp_path: Path, local: bool) -> None:
    """As huggingface_hub lays it out, and as it once filled a folder of the user's choice."""
    blobs = tmp_path / "hub" / "models--who--model" / "blobs"
    for i, path in enumerate([path for path in model.rglob("*") if path.is_file()]):
        moved(path, blobs / f"{i:040x}")
    folder = model if local else shutil.move(model, blobs.parent / "snapshots" / "0123abcd")
    assert whole_run(folder)().isfinite().all()


def test_hosts_folders_are_known_after_a_look_into_them() -> None:
    find_pipelines()
    assert Path(folder_paths.get_folder_paths("text_encoders")[0]).resolve() in files.model_roots
    assert not any("custom_nodes" in root.parts for root in files.model_roots)


def test_llama_may_be_a_link_and_its_files_may_not(tiny_folders: Folders, tmp_path: Path) -> None:
    folder, llama = published(tiny_folders("hidream"), tmp_path)
    (folder / "text_encoder_4").symlink_to(llama, target_is_directory=True)
    assert ballast.open_pipeline(folder, device="cpu").encoders[3].module is not None
    moved(llama / "config.json", tmp_path / "elsewhere" / "config.json")
    assert "elsewhere" in refusal(lambda: ballast.open_pipeline(folder, device="cpu"))


@pytest.mark.parametrize("name", ["transformer/config.json", "vae", "text_encoder/tokenizer.json"])
def test_link_out_of_newbie(tmp_path: Path, name: str) -> None:
    folder = official(tmp_path / "newbie")
    if not (folder / name).exists():
        pytest.skip(f"this layout has no {name}")
    moved(folder / name, tmp_path / "elsewhere" / "file")
    assert "elsewhere" in refusal(lambda: ballast.open_pipeline(folder, device="cpu"))
