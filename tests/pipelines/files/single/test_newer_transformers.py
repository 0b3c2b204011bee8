"""Transformers since 2025 from one file, with the names of the original release and of ComfyUI's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ballast.memory.weights.encoded import encoded_weights
from ballast.memory.weights.encoding import EncodedWeight
from ballast.pipelines.files.components import read_components
from ballast.pipelines.files.placing import read_whole
from ballast.pipelines.files.single.component import FileComponent
from ballast.pipelines.files.single.given import GivenFiles
from safetensors.torch import save_file
from single_files.newer_models import NEWER, apart
from single_files.original_names import in_comfyui
from test_quantised_files import WRITERS, decoded

BF16 = torch.bfloat16
COMFY = "model.diffusion_model."
PREFIXES = {"comfy": COMFY, "cosmos": "net.", "hunyuan": "model.model."}
State = dict[str, torch.Tensor]


def base_of(name: str, at: Path, size: str = "tiny", **changes: Any) -> Path:
    """A base with a transformer's config alone."""
    (at / "transformer").mkdir(parents=True)
    config = NEWER[name].config(size) | changes
    (at / "transformer" / "config.json").write_text(json.dumps(config), "utf-8")
    return at


def component(path: Path, base: Path, dtype: torch.dtype | None = None) -> FileComponent:
    config = json.loads((base / "transformer" / "config.json").read_text("utf-8"))
    index = {"transformer": ["diffusers", config["_class_name"]]}
    found = read_components(base, index, dtype, None, GivenFiles(path).components(index))["transformer"]
    assert isinstance(found, FileComponent)
    return found


def loaded(found: FileComponent) -> Any:
    unit = found.unit("")
    unit.load()
    return unit.module


def scaled(name: str) -> str:
    """As ComfyUI saved norms before it called their weights so."""
    return name.replace("_norm.weight", "_norm.scale")


def written(name: str) -> str:
    """As later versions of ComfyUI save norms."""
    return name.replace("_norm.scale", "_norm.weight").replace("txt_norm.scale", "txt_norm.weight")


# What a file calls the weights of each: the original names, and what ComfyUI makes of them.
LAYOUTS: list[tuple[str, str, Callable[[State], State]]] = [(name, "", dict) for name in NEWER]
LAYOUTS += [(name, COMFY, dict) for name in NEWER]
for hunyuan in ("hunyuan_image", "hunyuan_image_distilled", "hunyuan_image_refiner", "hunyuan_video15"):
    LAYOUTS += [
        (hunyuan, "model.model.", lambda state: {in_comfyui(name): value for name, value in state.items()}),
        (hunyuan, "model.model.", lambda state: {scaled(in_comfyui(name)): value for name, value in state.items()}),
    ]
LAYOUTS += [
    ("hunyuan_video15", "", apart),
    ("ovis", "", lambda state: {written(name): value for name, value in state.items()}),
    ("longcat", "", lambda state: {written(name): value for name, value in state.items()}),
    ("cosmos", "net.", dict),
]


def some(values: list[Any], *always: Any, variants: Sequence[Any] = ()) -> list[Any]:
    """The values as parameters; all but `always` take long, and those of `variants` are of the soak."""
    rest = [value if type(value) is tuple else (value,) for value in values if value not in always]
    marks = [pytest.mark.soak if (v if len(v) > 1 else v[0]) in variants else pytest.mark.long for v in rest]
    return [*always, *(pytest.param(*v, marks=mark) for v, mark in zip(rest, marks, strict=True))]


VARIANTS = ("hunyuan_image_distilled", "hunyuan_image_refiner", "hunyuan_video15_meanflow", "ltx2")  # in one value each


FAST = {"hunyuan_image", "hunyuan_video15", "ovis", "longcat", "krea2", "qwen_image21", "ltx23", "minimax_h3", "cosmos"}


def marked(case: tuple[str, str, Any]) -> Any:
    """Once without a prefix, and Hunyuan's under ComfyUI's names; what more there is takes long."""
    name, prefix, change = case
    fast = name in FAST and (not prefix or (name == "hunyuan_image" and change is not dict) or prefix == "net.")
    return case if fast else pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(("name", "prefix", "change"), map(marked, LAYOUTS))
def test_the_original_file_gives_the_weights_of_the_folder(
    name: str, prefix: str, change: Callable[[State], State], tmp_path: Path
) -> None:
    """Bit for bit, in bf16."""
    made = NEWER[name].build().to(BF16)
    state = change(NEWER[name].original(made.state_dict())) | NEWER[name].beside
    save_file(
        {prefix + key: value.contiguous().clone() for key, value in state.items()}, path := tmp_path / "m.safetensors"
    )
    module = loaded(component(path, base_of(name, tmp_path / "base")))
    expected = made.state_dict()
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key].to(value.dtype)) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", some(list(NEWER), "longcat", "cosmos"))
def test_a_file_with_the_names_of_diffusers(name: str, tmp_path: Path) -> None:
    made = NEWER[name].build()
    save_file(made.state_dict(), path := tmp_path / "m.safetensors")
    state = loaded(component(path, base_of(name, tmp_path / "base"))).state_dict()
    assert all(torch.equal(value, state[key]) for key, value in made.state_dict().items())


def test_files_of_h3_that_cannot_be_read(tmp_path: Path) -> None:
    """Pruned ones have a table that no class has, and rows of the original shards lie in another order."""
    state = NEWER["minimax_h3"].original(NEWER["minimax_h3"].build().state_dict())
    base = base_of("minimax_h3", tmp_path / "base")
    table = {name: tensor.contiguous() for name, tensor in state.items() if not name.startswith("time_embedder")}
    save_file(table | {"adaln_t_table": torch.zeros(4, 2)}, path := tmp_path / "pruned.safetensors")
    with pytest.raises(ValueError, match=r"^[^\n]*adaln_t_table[^\n]*$"):
        component(path, base)
    for number in (1, 2):
        some = {name: tensor.contiguous() for name, tensor in list(state.items())[number - 1 :: 2]}
        save_file(some, path := tmp_path / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"^[^\n]*is a shard of MiniMax-H3[^\n]*$"):
        component(path, base)


def sparse(at: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A safetensors file of bf16 weights that takes no disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with at.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return at


@pytest.mark.parametrize("name", some(list(NEWER), "ovis", variants=VARIANTS))
def test_published_widths(name: str, tmp_path: Path) -> None:
    """Every name and shape of the published model, and the values of its config."""
    with torch.device("meta"):
        made = NEWER[name].build("published")
        original = NEWER[name].original(made.state_dict())
    shapes = {COMFY + key: tuple(value.shape) for key, value in original.items()}
    found = component(sparse(tmp_path / "m.safetensors", shapes), base_of(name, tmp_path / "base", "published"))
    expected = {key: tuple(value.shape) for key, value in made.named_parameters()}
    assert {key: tuple(source.shape) for key, source in found.stored.items()} == expected
    assert {key: value for key, value in found.config.items() if key in made.config} == dict(found.config)


WIDE: dict[str, dict[str, Any]] = {  # sizes that blocks of 32 weights fit
    "hunyuan_image": {"text_embed_dim": 64, "text_embed_2_dim": 32},
    "hunyuan_video15": {"text_embed_dim": 64, "text_embed_2_dim": 32, "image_embed_dim": 32},
    "ovis": {"joint_attention_dim": 64},
    "longcat": {"joint_attention_dim": 64},
    "krea2": {"intermediate_size": 64, "text_hidden_dim": 32, "text_intermediate_size": 32},
    "qwen_image21": {"context_in_dim": 64},
    "ltx2": {"attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 64},
    "minimax_h3": {"hidden_size": 32, "ffn_dim": 64, "text_dim": 64, "freq_dim": 32, "time_embed_dim": 32},
    "cosmos": {"text_embed_dim": 64, "adaln_lora_dim": 32},
}
APART = {"ovis": ("fp8 of one scale",)}  # two layers that are one in diffusers, each with a scale of its own


@pytest.mark.parametrize(
    ("name", "how"),
    some(
        [(name, how) for name in WIDE for how in ("q8_0", "q4_0", "int8", "fp8", "fp8 of one scale")],
        ("ovis", "q8_0"), ("ovis", "fp8 of one scale"), ("longcat", "fp8 of one scale"), ("minimax_h3", "int8"),
        variants=[(name, how) for name in WIDE for how in ("q8_0", "int8", "fp8", "fp8 of one scale")],
    ),
)  # fmt: skip
def test_quantised_files(name: str, how: str, tmp_path: Path) -> None:
    """Weights are decoded to what the file's own are, renamed, split and swapped as plain ones."""
    tiny, sizes = NEWER[name], WIDE[name]
    made: Any = type(tiny.build()).from_config({**tiny.config(), **sizes})
    torch.manual_seed(1)
    state = {key: torch.randn_like(value) for key, value in made.state_dict().items()}
    path = WRITERS[how](
        tmp_path / "m.safetensors", {COMFY + k: v.contiguous() for k, v in tiny.original(state).items()}
    )
    base = base_of(name, tmp_path / "base", **sizes)
    if how in APART.get(name, ()):
        with pytest.raises(ValueError, match=r"^[^\n]*gate_proj.weight: it is joined with another[^\n]*$|up_proj"):
            component(path, base, BF16)
        return
    values = {key: decoded(weight) for key, weight in encoded_weights(path, BF16).items()}
    plain = {key: value.reshape(tiny.original(state)[key.removeprefix(COMFY)].shape) for key, value in values.items()}
    save_file({key: value.contiguous() for key, value in plain.items()}, same := tmp_path / "same.safetensors")
    found, expected = component(path, base, BF16), loaded(component(same, base, BF16)).state_dict()
    assert sum(isinstance(source, EncodedWeight) for source in found.stored.values()) > 10
    for key, source in found.stored.items():
        value = read_whole(source).reshape(expected[key].shape)
        assert torch.equal(value.to(BF16), expected[key].to(BF16)), key
