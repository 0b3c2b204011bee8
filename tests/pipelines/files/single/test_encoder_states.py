"""Text encoders of every kind in single files: the states of transformers' own with the same values, streamed too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest
import torch
import transformers
from ballast.memory import manager
from ballast.memory.weights.encoding import EncodedWeight
from ballast.pipelines.files.components import Component
from ballast.pipelines.files.single.component import FileComponent, encoder_component
from gguf import quants
from safetensors.torch import save_file
from tiny_parts import decoder_sizes

State = dict[str, torch.Tensor]
Q8 = gguf.GGMLQuantizationType.Q8_0
FP8 = torch.float8_e4m3fn
CLIP = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
T5 = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2}
TEXT = decoder_sizes(64, 2, intermediate_size=64, num_key_value_heads=1) | {"head_dim": 32, "sliding_window": 4}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
# The class, its config, and the architecture and prefix of its GGUF; llama.cpp has none for CLIP.
KINDS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "CLIP-L": ("CLIPTextModel", "CLIPTextConfig", CLIP | {"eos_token_id": 2}, "", ""),
    "CLIP-G": ("CLIPTextModelWithProjection", "CLIPTextConfig", CLIP | {"projection_dim": 32, "hidden_act": "gelu"}, "",
               ""),
    "T5": ("T5EncoderModel", "T5Config", T5 | {"feed_forward_proj": "gated-gelu"}, "T5ENCODER", ""),
    "UMT5": ("UMT5EncoderModel", "UMT5Config", T5 | {"feed_forward_proj": "gated-gelu"}, "T5", ""),
    "Llama": ("LlamaModel", "LlamaConfig", TEXT, "LLAMA", "model."),
    "Qwen2.5-VL": ("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", TEXT | {"rope_parameters": MROPE}, "QWEN2VL",
                   "model."),
    "Qwen3": ("Qwen3Model", "Qwen3Config", TEXT, "QWEN3", "model."),
    "Gemma 2": ("Gemma2Model", "Gemma2Config", TEXT, "GEMMA2", "model."),
    "Gemma 3": ("Gemma3TextModel", "Gemma3TextConfig", TEXT, "GEMMA3", "model."),
}  # fmt: skip


def made(kind: str) -> Any:
    """One whose weights are all unlike."""
    cls, config, sizes, _, _ = KINDS[kind]
    module = getattr(transformers, cls)(getattr(transformers, config)(**sizes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 if "norm" in name else 0.1))
    return module


def is_matrix(value: torch.Tensor) -> bool:
    return value.ndim == 2 and value.shape[1] % 32 == 0


def halved(kind: str, state: State, at: Path) -> tuple[Path, State]:
    half = {name: value.half() for name, value in state.items()}
    save_file(half, path := at / "encoder.safetensors")
    return path, {name: value.float() for name, value in half.items()}


def scaled(kind: str, state: State, at: Path) -> tuple[Path, State]:
    """fp8 as ComfyUI's files have it: a scale for each matrix."""
    stored: State = {"scaled_fp8": torch.zeros(2).to(FP8)}
    values = dict(state)
    for name, value in state.items():
        stored[name] = value
        if is_matrix(value):
            scale = value.abs().max() / 448
            stored[name] = (value / scale).to(FP8)
            stored[f"{name.removesuffix('weight')}scale_weight"] = scale
            values[name] = stored[name].float() * scale
    save_file(stored, path := at / "encoder.safetensors")
    return path, values


def in_gguf(kind: str, state: State, at: Path) -> tuple[Path, State]:
    """By llama.cpp's names, with 1 added to Gemma's norms, and the rows of Llama's queries and keys as it has them."""
    _, _, _, architecture, prefix = KINDS[kind]
    arch = getattr(gguf.MODEL_ARCH, architecture)
    names, writer = (
        gguf.get_tensor_name_map(arch, 99),
        gguf.GGUFWriter(path := at / "e.gguf", gguf.MODEL_ARCH_NAMES[arch]),
    )
    values = dict(state)
    for name, value in state.items():
        given = value
        if "GEMMA" in architecture and name.endswith("norm.weight"):
            given = value + 1
        if architecture == "LLAMA" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = len(value) // 32
            given = value.view(heads, 2, 16, -1).swapaxes(1, 2).reshape(value.shape)
        full = str(names.get_name(prefix + name, (".weight", ".bias")))
        if is_matrix(value):
            writer.add_tensor(full, quants.quantize(given.numpy(), Q8), raw_dtype=Q8)
            values[name] = torch.from_numpy(quants.dequantize(quants.quantize(value.numpy(), Q8), Q8))
        else:
            writer.add_tensor(full, given.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values


def clip_in_gguf(names: Callable[[str], str], architecture: str) -> Callable[[str, State, Path], tuple[Path, State]]:
    """CLIP as tools of other names than llama.cpp's write it."""

    def write(kind: str, state: State, at: Path) -> tuple[Path, State]:
        writer, values = gguf.GGUFWriter(path := at / "c.gguf", architecture), dict(state)
        for name, value in state.items():
            if is_matrix(value):
                packed = quants.quantize(value.numpy(), Q8)
                writer.add_tensor(names(name), packed, raw_dtype=Q8)
                values[name] = torch.from_numpy(quants.dequantize(packed, Q8))
            else:
                writer.add_tensor(names(name), value.numpy())
        if architecture == "clip":  # which sees, too
            writer.add_tensor("v.post_ln.weight", torch.ones(64).numpy())
            writer.add_tensor("visual_projection.weight", torch.ones(64, 64).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, values

    return write


def clip_cpp(name: str) -> str:
    """As the converter of clip.cpp names a tensor, in its own order."""
    if "projection" in name:
        return name
    name = name if name.startswith("text_model.") else f"text_model.{name}"
    for theirs, ours in (
        ("text_model", "t"), ("encoder.layers", "blk"), ("embeddings.", ""), ("_proj", ""), ("self_attn.", "attn_"),
        ("layer_norm", "ln"), ("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up"), ("embedding", "embd"), ("final", "post"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def as_transformers(name: str) -> str:
    return name if name.startswith("text_") else f"text_model.{name}"


FORMS: dict[str, Callable[[str, State, Path], tuple[Path, State]]] = {"fp16": halved, "fp8": scaled, "gguf": in_gguf}
OF_CLIP = {
    "gguf, transformers' names": clip_in_gguf(as_transformers, "pig"),
    "gguf of clip.cpp": clip_in_gguf(clip_cpp, "clip"),
}
CASES = [
    (kind, form) for kind, sizes in KINDS.items() for form in (FORMS if sizes[3] else [*list(FORMS)[:2], *OF_CLIP])
]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_states_are_those_of_transformers(kind: str, form: str, tmp_path: Path, sim: ModuleType) -> None:
    found = check_states(kind, (FORMS | OF_CLIP)[form], tmp_path, sim)
    assert (form != "fp16") == any(isinstance(source, EncodedWeight) for source in found.stored.values())


def check_states(
    kind: str, write: Callable[[str, State, Path], tuple[Path, State]], tmp_path: Path, sim: ModuleType
) -> FileComponent:
    """Compare the states of an encoder read from the file that is written with those of transformers."""
    module = made(kind)
    module.config.save_pretrained(tmp_path / "text_encoder")
    seen = {id(value): name for name, value in reversed(list(module.named_parameters(remove_duplicate=False)))}
    state = {name: dict(module.named_parameters(remove_duplicate=False))[name].clone() for name in seen.values()}
    path, values = write(kind, state, tmp_path)
    expected_model = copy.deepcopy(module)
    with torch.no_grad():
        for name, parameter in expected_model.named_parameters(remove_duplicate=False):
            if name in values:
                parameter.copy_(values[name])
    ids = torch.tensor([[5, 9, 17, 33, 2, 2, 60, 7]])
    expected = expected_model(input_ids=ids, output_hidden_states=True).hidden_states
    config = module.config.to_dict()
    base = Component("text_encoder", tmp_path / "text_encoder", type(module), torch.float32, config)
    found = encoder_component(base, path)
    unit = found.unit("")
    for strategy in ("resident", "streamed"):
        with manager("sim").use(unit, strategy) as placed:
            states = placed(input_ids=ids.to("sim"), output_hidden_states=True).hidden_states
            states = [each.to("cpu") for each in states]
        assert len(states) == len(expected) > 2
        for one, other in zip(states, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        del placed, one
        manager("sim").free()
        assert sim.stats().allocated_bytes == 0
    return found


@pytest.mark.parametrize(
    ("architecture", "tensor", "words"),
    [
        (
            "clip",
            "v.blk.0.attn_q.weight",
            r"is GGUF of a tower for pictures, and reads no text\. Get the text encoder's",
        ),
        ("pig", "blk.0.attn_q.weight", r"is GGUF of 'pig'; of text encoders these are read: t5, .*, CLIP\. Get safe"),
    ],
)
def test_gguf_that_is_no_text_encoder(architecture: str, tensor: str, words: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "c.gguf", architecture)
    writer.add_tensor(tensor, torch.ones(64, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    module = made("CLIP-L")
    base = Component("text_encoder", tmp_path, type(module), torch.float32, module.config.to_dict())
    with pytest.raises(ValueError, match=words) as caught:
        encoder_component(base, path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def renamed(
    architecture: str, prefix: str, llama_cpp: bool = False
) -> Callable[[str, State, Path], tuple[Path, State]]:
    """Encoders in GGUF by transformers' names, or llama.cpp's, behind a prefix, maybe without an architecture."""

    def write(kind: str, state: State, at: Path) -> tuple[Path, State]:
        names, named = None, KINDS[kind][3]
        if llama_cpp and named:
            arch = getattr(gguf.MODEL_ARCH, named)
            names = gguf.get_tensor_name_map(arch, 99)
        writer, values = gguf.GGUFWriter(path := at / "e.gguf", architecture), dict(state)
        for name, value in state.items():
            given = str(names.get_name(KINDS[kind][4] + name, (".weight", ".bias"))) if names else name
            if llama_cpp and not names:
                given = clip_cpp(name)
            if is_matrix(value):
                packed = quants.quantize(value.numpy(), Q8)
                writer.add_tensor(prefix + given, packed, raw_dtype=Q8)
                values[name] = torch.from_numpy(quants.dequantize(packed, Q8))
            else:
                writer.add_tensor(prefix + given, value.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, values

    return write


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [
        ("", ""),
        pytest.param("pig", "t5xxl.transformer.", marks=pytest.mark.long),
        pytest.param("", "text_model.", marks=pytest.mark.soak),
        ("own", "text_encoders.any_7b.transformer.model."),
    ],
)
def test_gguf_by_the_names_of_transformers(
    kind: str, architecture: str, prefix: str, tmp_path: Path, sim: ModuleType
) -> None:
    """Under the architecture of its own too, which says how llama.cpp alters weights: these it has not altered."""
    if architecture == "own":
        named = KINDS[kind][3]
        architecture = gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, named)] if named else "clip"
    check_states(kind, renamed(architecture, prefix), tmp_path, sim)


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_names_without_an_architecture(kind: str, tmp_path: Path, sim: ModuleType) -> None:
    """Read where llama.cpp stores weights as they are; of others nothing tells the order of rows, or what was added."""
    write = renamed("", "t5xxl.transformer.", llama_cpp=True)
    if KINDS[kind][3] in ("LLAMA", "GEMMA2", "GEMMA3"):
        with pytest.raises(ValueError, match=r"e\.gguf is GGUF without general\.architecture, so .* Get another"):
            check_states(kind, write, tmp_path, sim)
    else:
        check_states(kind, write, tmp_path, sim)
