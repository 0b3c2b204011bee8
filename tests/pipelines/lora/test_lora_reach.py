"""What a LoRA file may reach beside layers: norms, bare parameters, encoders; and what it has that a model has not."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from adapters import lora_files
from adapters.lora_files import read_lora
from ballast.commands.arguments import add_model_arguments, family_arguments
from ballast.memory.weights.branches import Adapter, attach, detach, set_strengths
from ballast.pipelines.lora.build import LeaveOut
from ballast.pipelines.lora.use import expert_of
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.normalization import RMSNorm as DiffusersNorm
from safetensors.torch import save_file
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.umt5.modeling_umt5 import UMT5LayerNorm

Tensors = dict[str, torch.Tensor]
Folders = Callable[[str], Path]
NORMS: list[Callable[[int], nn.Module]] = [
    nn.LayerNorm, nn.RMSNorm, lambda size: nn.GroupNorm(2, size), lambda size: FP32LayerNorm(size, eps=1e-5),
    lambda size: DiffusersNorm(size, eps=1e-6), T5LayerNorm, UMT5LayerNorm, LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm,
    Qwen3RMSNorm, GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm, CohereLayerNorm,
]  # fmt: skip


def pair(generator: torch.Generator, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, into = weight.shape
    down = torch.randn(4, into, generator=generator) / into**0.5
    return down, 0.3 * torch.randn(out, 4, generator=generator)


def low_rank(layer: str, down: torch.Tensor, up: torch.Tensor) -> Tensors:
    return {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_every_norm_is_as_if_merged(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, whatever its class makes of its weight; two files add up, and they go without a trace."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({f"n{i}": make(8) for i, make in enumerate(NORMS)})
    for parameter in model.parameters():
        parameter.normal_(generator=generator)
    model = model.to(dtype)
    plain, merged = copy.deepcopy(model), copy.deepcopy(model)
    tensors = {}
    for name, parameter in merged.named_parameters():
        layer, what = name.split(".")
        delta = torch.randn(8, generator=generator)
        tensors[f"{layer}.{'diff' if what == 'weight' else 'diff_b'}"] = delta
        parameter.copy_(parameter.float() + delta.to(dtype).float() * 0.5 + delta.to(dtype).float() * 0.25)
    path = lora_files.write(tmp_path / "norms.safetensors", tensors)
    one, other = (Adapter(i, read_lora(path, None, {"transformer": model})["transformer"]) for i in range(2))
    attach(model, [(one, 0.5), (other, 2.0)])
    set_strengths(model, [(one, 0.5), (other, 0.25)])
    x = torch.randn(3, 8, generator=generator).to(dtype)
    for name, norm in model.items():
        assert torch.equal(norm(x), merged[name](x)), type(norm)
        assert not torch.equal(norm(x), plain[name](x)), type(norm)
    detach(model)
    assert all(torch.equal(norm(x), plain[name](x)) for name, norm in model.items())
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("named", ["diff_m", "own"])
def test_bare_parameters_of_blocks_are_as_if_merged(
    named: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """Wan's distilled files change its tables of modulations, of each block and of the last layer, and its norms."""
    folder, generator = tiny_folders("wan"), torch.Generator().manual_seed(7)
    module = lora_files.transformer_of(folder)
    tables = {path: 0.2 * torch.randn(p.shape, generator=generator) for path, p in module.named_parameters()
              if path.endswith("scale_shift_table")}  # fmt: skip
    assert len(tables) == 1 + len(module.blocks)
    norm = 0.2 * torch.randn(module.blocks[0].norm2.weight.shape, generator=generator)
    down, up = pair(generator, module.blocks[0].attn1.to_q.weight)
    if named == "own":
        tensors = {f"transformer.{path}.diff": value for path, value in tables.items()}
        tensors |= {"transformer.blocks.0.norm2.diff": norm} | low_rank("transformer.blocks.0.attn1.to_q", down, up)
    else:
        layers = {path: path.removesuffix("scale_shift_table").rstrip(".") or "head" for path in tables}
        tensors = {f"diffusion_model.{layers[path]}.diff_m": value for path, value in tables.items()}
        tensors |= {"diffusion_model.blocks.0.norm3.diff": norm}
        tensors |= low_rank("diffusion_model.blocks.0.self_attn.q", down, up)
    path = lora_files.write(tmp_path / "distilled.sft", tensors)

    def merge(pipe: Any) -> None:
        with torch.no_grad():
            for name, value in tables.items():
                pipe.transformer.get_parameter(name).add_(0.7 * value)
            pipe.transformer.blocks[0].norm2.weight.add_(0.7 * norm)
            pipe.transformer.blocks[0].attn1.to_q.weight.add_(0.7 * up @ down)

    expected = lora_files.changed(folder, merge)
    pipe, encode, sample, _ = tiny.stages("wan", folder, "sim", cache_dir=tmp_path)
    cond = encode()
    plain = sample(cond)
    pipe.set_loras([(path, 0.7)])
    for strategy in ("resident", "streamed", "leafwise"):
        torch.testing.assert_close(sample(cond, strategy=strategy), expected, atol=1e-5, rtol=1e-5)
        assert sim.stats().allocated_bytes == 0
    assert (plain - expected).abs().max() > 0.01
    pipe.set_loras([])
    assert torch.equal(sample(cond), plain)


@torch.no_grad()
def test_bare_parameters_compile_whole(tmp_path: Path) -> None:
    """Without a break of the graph, and a change of strength is followed."""
    module = tiny.FAMILIES["wan"].build().transformer
    norm = module.blocks[0].norm2
    x = torch.randn(2, 5, norm.weight.shape[0])
    path = lora_files.write(tmp_path / "one.safetensors", {"blocks.0.norm2.diff": torch.ones(x.shape[-1])})
    adapter = Adapter("one", read_lora(path, None, {"transformer": module})["transformer"])
    attach(module, [(adapter, 0.5)])
    torch._dynamo.reset()
    fast = torch.compile(norm, backend="eager", fullgraph=True)
    for strength in (0.5, 0.7):
        set_strengths(module, [(adapter, strength)])
        torch.testing.assert_close(fast(x), norm(x))
    torch._dynamo.reset()


def encoders(prefix: str, name: str, generator: torch.Generator, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    down, up = pair(generator, weight)
    layer = f"{prefix}{name if '.' in prefix else name.replace('.', '_')}"
    return low_rank(layer, down, up), up @ down


@pytest.mark.parametrize("prefix", ["lora_te2_", "lora_te3_", "text_encoders.t5xxl.transformer."])
def test_t5_is_the_same_by_each_of_its_names(prefix: str, tiny_folders: Folders, tmp_path: Path) -> None:
    """OneTrainer numbers encoders as pipelines do, kohya calls T5 the third; and its norms are changed too."""
    folder, generator = tiny_folders("flux"), torch.Generator().manual_seed(5)
    pipe = tiny.FAMILIES["flux"].build()
    query, norm = "encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.0.layer_norm"
    tensors, made = encoders(prefix, query, generator, pipe.text_encoder_2.get_submodule(query).weight)
    delta = 0.3 * torch.randn(pipe.text_encoder_2.get_submodule(norm).weight.shape, generator=generator)
    tensors[f"{prefix}{norm if '.' in prefix else norm.replace('.', '_')}.diff"] = delta
    path = lora_files.write(tmp_path / "t5.safetensors", tensors)

    def merge(pipe: Any) -> None:
        with torch.no_grad():
            pipe.text_encoder_2.get_submodule(query).weight.add_(made)
            pipe.text_encoder_2.get_submodule(norm).weight.add_(delta)

    expected = lora_files.changed(folder, merge)
    _, encode, sample, _ = tiny.stages("flux", folder, "cpu", cache_dir=tmp_path, loras=[(path, 1.0)])
    torch.testing.assert_close(sample(encode()), expected, atol=1e-5, rtol=1e-5)


def test_the_second_clip_keeps_its_number(tmp_path: Path) -> None:
    pipe = tiny.FAMILIES["sd3"].build()
    modules = {name: getattr(pipe, name) for name in ("transformer", "text_encoder_2", "text_encoder_3")}
    layer = next(n for n, m in pipe.text_encoder_2.named_modules() if n.endswith("fc1"))
    tensors, _ = encoders("lora_te2_", layer, torch.Generator(), pipe.text_encoder_2.get_submodule(layer).weight)
    path = lora_files.write(tmp_path / "clip.safetensors", tensors)
    assert read_lora(path, type(pipe), modules).keys() == {"text_encoder_2"}
    layer = "encoder.block.0.layer.0.SelfAttention.q"
    tensors, _ = encoders("lora_te2_", layer, torch.Generator(), pipe.text_encoder_3.get_submodule(layer).weight)
    with pytest.raises(ValueError, match="no place for, such as lora_te2_encoder_block") as refused:
        read_lora(lora_files.write(path, tensors), type(pipe), modules)
    assert "{" not in str(refused.value)


# What a file has for parts that a model has not


def with_image_keys(module: nn.Module) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    tensors = low_rank("diffusion_model.blocks.0.self_attn.q", *pair(generator, module.blocks[0].attn1.to_q.weight))
    tensors |= low_rank("diffusion_model.blocks.0.cross_attn.k", *pair(generator, module.blocks[0].attn2.to_k.weight))
    tensors |= low_rank("diffusion_model.blocks.0.cross_attn.k_img", torch.ones(4, 8), torch.ones(8, 4))
    return tensors | {"diffusion_model.img_emb.proj.0.diff_b": torch.ones(8)}


def test_parts_that_a_model_has_not_are_left_out_by_name(
    tiny_folders: Folders, tmp_path: Path, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folders("wan")
    tensors = with_image_keys(lora_files.transformer_of(folder))
    path = lora_files.write(tmp_path / "i2v.safetensors", tensors)
    kept = {name: value for name, value in tensors.items() if "img" not in name}
    plain = lora_files.write(tmp_path / "t2v.safetensors", kept)
    pipe, encode, sample, _ = tiny.stages("wan", folder, "sim", cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"k_img\.lora_down.weight.*leave out k_img, img_emb\.proj\.$") as refused:
        pipe.set_loras([(path, 1.0)])
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"such as diffusion_model\.img_emb.*leave out img_emb\.proj\.$"):
        pipe.set_loras([(path, 1.0, "k_img")])
    cond = encode()
    pipe.set_loras([(plain, 1.0)])
    expected = sample(cond)
    for parts in ("k_img, img_emb", ["cross_attn.k_img", "img_emb.proj"]):
        pipe.set_loras([(path, 1.0, parts)])
        assert torch.equal(sample(cond), expected)
        ((told,),) = pipe.notes_of_loras()
        assert told.startswith("3 weights of ") and told.endswith("are left out, which this model does not have")
        assert told in caplog.text
    named = LeaveOut(["self_attn"])
    module = lora_files.transformer_of(folder)
    assert len(read_lora(plain, None, {"transformer": module}, leave_out=named)["transformer"]) == 2
    assert not named.names, "what has a place is used"


def test_parts_are_named_with_underscores_too(tmp_path: Path) -> None:
    module = tiny.FAMILIES["wan"].build().transformer
    tensors = {}
    for name, value in with_image_keys(module).items():
        layer, role = name.removeprefix("diffusion_model.").split(".lora_" if ".lora_" in name else ".diff")
        role = f"lora_{role}" if ".lora_" in name else f"diff{role}"
        tensors[f"lora_unet_{layer.replace('.', '_')}.{role}"] = value
    path = lora_files.write(tmp_path / "kohya.safetensors", tensors)
    with pytest.raises(ValueError, match=r"cross_attn_k_img\.lora_down.*leave out k_img, img_emb_proj\.$"):
        read_lora(path, None, {"transformer": module})
    leave_out = LeaveOut(["k_img", "img_emb_proj"])
    assert len(read_lora(path, None, {"transformer": module}, leave_out=leave_out)["transformer"]) == 2
    assert len(leave_out.names) == 3


def test_what_may_scale_a_layer_that_is_there_is_never_left_out(tmp_path: Path) -> None:
    module = tiny.FAMILIES["flux"].build().transformer
    name = "transformer_blocks.0.attn.to_q"
    pair = {
        f"transformer.{name}.lora_A.weight": torch.ones(4, 32),
        f"transformer.{name}.lora_B.weight": torch.ones(32, 4),
    }
    for stray in (
        f"transformer.{name}.lora_alpha",
        f"transformer.{name}.lora_A.weight_scale",
        "transformer.transformer_blocks.0.attn.to_k.weight",
        "diffusion_model.double_blocks.0.img_attn.qkv.alpha",
        "lora_scale",
    ):
        path = lora_files.write(tmp_path / "stray.safetensors", pair | {stray: torch.ones(1)})
        with pytest.raises(ValueError, match=f"no place for, such as {re.escape(stray)}. It is of another model"):
            read_lora(path, None, {"transformer": module}, leave_out=LeaveOut([stray, *stray.split(".")]))
    second = f"transformer.{name}.lora_A.second.weight"  # of another of peft's adapters
    path = lora_files.write(tmp_path / "two.safetensors", pair | {second: torch.ones(4, 32)})
    with pytest.raises(ValueError, match="beside another of its kind"):
        read_lora(path, None, {"transformer": module}, leave_out=LeaveOut([second, *second.split(".")]))


def test_settings_of_no_model_are_refused(tmp_path: Path) -> None:
    """An alpha among them would count for nothing."""
    module = tiny.FAMILIES["flux"].build().transformer
    path = tmp_path / "settings.safetensors"
    save_file(lora_files.weights(module, 4), path, {"lora_adapter_metadata": json.dumps({"r": 4, "lora_alpha": 2})})
    with pytest.raises(ValueError, match="notes r in its header and not of which model"):
        read_lora(path, None, {"transformer": module})


def test_a_bundled_embedding_is_named(tmp_path: Path) -> None:
    module = tiny.FAMILIES["flux"].build().transformer
    tensors = lora_files.weights(module, 4) | {"bundle_emb.word.clip_l": torch.ones(2, 32)}
    path = lora_files.write(tmp_path / "bundle.safetensors", tensors)
    with pytest.raises(ValueError, match=r"bundles an embedding for prompts \(bundle_emb\.word\.clip_l\)"):
        read_lora(path, None, {"transformer": module})
    read_lora(path, None, {"transformer": module}, leave_out=LeaveOut(["bundle_emb"]))


def test_the_command_line_names_parts(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    given = ["--lora", "a.safetensors:0.5", "--lora", "b.sft", "--lora-leave-out", "k_img,v_img"]
    loras = family_arguments(parser.parse_args(given))["loras"]
    assert loras == [(Path("a.safetensors"), 0.5, "k_img,v_img"), (Path("b.sft"), 1.0, "k_img,v_img")]


# Two experts

HIGH, LOW = "transformer", "transformer_2"


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise", HIGH),
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_low_noise", LOW),
        ("Wan2.2-Lightning_T2V-A14B-4steps-lora_LOW_fp16", LOW),
        ("HighNoise-style", HIGH),
        ("low_noise_model", LOW),
        ("wan22-style-low", LOW),
        ("wan22 style LOW v1.0 rank64", LOW),
        ("low_poly", None),
        ("high-quality-faces", None),
        ("slow", None),
        ("glow_v2", None),
        ("yellow", None),
        ("high_noise_and_low_noise", None),
        ("detail", None),
    ],
)
def test_names_of_files_tell_experts(name: str, expert: str | None) -> None:
    assert expert_of(Path(f"{name}.safetensors")) == expert


def test_a_file_goes_to_the_expert_of_its_name(tmp_path: Path) -> None:
    pipe = tiny.FAMILIES["wan"].build()
    pipe.register_modules(transformer_2=type(pipe.transformer).from_config(pipe.transformer.config))
    pipe.register_to_config(boundary_ratio=0.9)
    pipe.save_pretrained(tmp_path / "two")
    tensors = lora_files.weights(pipe.transformer, 4)
    low, high, any_ = (tmp_path / f"{name}.safetensors" for name in ("a_low_noise", "a_high_noise", "a"))
    both = lora_files.write(
        tmp_path / "b_low_noise.safetensors", tensors | lora_files.weights(pipe.transformer, 4, 1, "transformer_2.")
    )
    for path in (low, high, any_):
        lora_files.write(path, tensors)
    opened, *_ = tiny.stages("wan", tmp_path / "two", "cpu", cache_dir=tmp_path)
    for path, used, told in (
        (any_, {HIGH}, "used for transformer (high noise)"),
        (low, {LOW}, "used for transformer_2 (low noise), by the file's name"),
        (high, {HIGH}, "used for transformer (high noise), by the file's name"),
        (both, {HIGH, LOW}, "used for transformer (high noise) and transformer_2 (low noise)"),
    ):
        opened.set_loras([(path, 0.5)])  # each is the same file as the one before, but for its name
        assert opened._loras[0].strengths == dict.fromkeys(used, 0.5)
        assert opened.notes_of_loras() == [[told]]
    opened.set_loras([(low, {HIGH: 0.5})])
    assert opened._loras[0].strengths == {HIGH: 0.5}, "what is said goes before a name"
