"""The host's own CLIP and VAE in our nodes: first what needs no host, then on a real ComfyUI with a simulated card."""

from __future__ import annotations

import gc
import threading
from collections import namedtuple
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.host import management as host
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.free import FreeVram, Held, compose, free
from ballast.nodes.native import clip as native_clip
from ballast.nodes.native.clip import encode_prompts
from ballast.nodes.native.module_copies import float32_copy
from comfy_execution.graph_utils import ExecutionBlocker
from host import page, run_node
from node_runner import native_models
from torch import nn

Kept = namedtuple("Kept", ["weight", "inplace_update"])


class Encoder(nn.Module):
    """As much of a host's encoder as the nodes look at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)


class Patcher:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.backup: dict[str, Any] = {}
        self.load_device = torch.device("cpu")

    def loaded_size(self) -> int:
        return 0

    def is_dynamic(self) -> bool:
        return False


class Clip:
    def __init__(self) -> None:
        self.cond_stage_model = Encoder()
        self.patcher = Patcher(self.cond_stage_model)
        self.encoded: list[str] = []

    def tokenize(self, text: str) -> str:
        return text

    def encode_from_tokens_scheduled(self, tokens: str) -> list[list[Any]]:
        self.encoded.append(tokens)
        return [[torch.full((1, 2, 3), float(len(tokens))), {"pooled_output": torch.ones(1, 3), "hooks": object()}]]


class Evictions(list):
    def __call__(self, patchers: list[Any]) -> None:
        self.extend(patchers)


@pytest.fixture
def evicted(monkeypatch: pytest.MonkeyPatch) -> Evictions:
    found = Evictions()
    monkeypatch.setattr(host, "evict", found)
    return found


def test_only_what_is_missing_is_encoded(evicted: Evictions) -> None:
    clip = Clip()
    first = encode_prompts(clip, ["a boat", ""])
    assert evicted == [clip.patcher] and clip.encoded == ["a boat", ""]
    again = encode_prompts(clip, ["", "a boat"])
    assert again.summary == "from the cache, no encoder loaded"
    assert len(evicted) == 1 and len(clip.encoded) == 2, "and the device is not touched"
    for before, after in zip(first.conditionings, reversed(again.conditionings), strict=True):
        assert before[0][0] is after[0][0] and before[0][1] == after[0][1]
    encode_prompts(clip, ["a ship", ""])
    assert clip.encoded == ["a boat", "", "a ship"]
    other = Clip()  # a clone with a LoRA, say
    encode_prompts(other, ["a boat", "a boat"])
    assert other.encoded == ["a boat"]


def test_later_nodes_may_change_what_they_get(evicted: Evictions) -> None:
    clip = Clip()
    for _ in range(2):
        ((embeddings, beside),) = encode_prompts(clip, ["a boat"]).conditionings[0]
        assert "strength" not in beside and embeddings.shape == (1, 2, 3)
        beside["strength"] = 0.5
    assert clip.encoded == ["a boat"]


def test_only_the_newest_prompts_are_kept_and_none_of_a_clip_that_is_gone(evicted: Evictions) -> None:
    clip = Clip()
    for number in range(20):
        encode_prompts(clip, [str(number), ""])
    encode_prompts(clip, ["19", "6", ""])
    assert len(clip.encoded) == 21, "the negative prompt was asked for all the time"
    encode_prompts(clip, ["0"])
    assert len(clip.encoded) == 22
    before = len(native_clip._known)
    del clip
    evicted.clear()
    gc.collect()
    assert len(native_clip._known) == before - 1


def test_embeddings_on_a_device_are_not_kept(evicted: Evictions, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with --gpu-only: nobody would count them there."""
    clip, there = Clip(), torch.ones(1, 2, 3, device="meta")
    monkeypatch.setattr(native_clip, "check_finite", lambda *_: None)
    clip.encode_from_tokens_scheduled = lambda tokens: clip.encoded.append(tokens) or [[there, {}]]  # type: ignore
    for _ in range(2):
        assert encode_prompts(clip, ["a boat"]).conditionings[0][0][0] is there
    assert clip.encoded == ["a boat", "a boat"]


@pytest.mark.parametrize("error", [RuntimeError("it failed"), KeyboardInterrupt()], ids=repr)
def test_encoder_leaves_when_it_fails(error: BaseException, evicted: Evictions) -> None:
    clip = Clip()

    def fail(tokens: Any) -> Any:
        raise error

    clip.encode_from_tokens_scheduled = fail  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        encode_prompts(clip, ["a boat"])
    assert evicted == [clip.patcher]


def test_values_that_are_not_finite_are_told_and_not_kept() -> None:
    clip = Clip()
    clip.encode_from_tokens_scheduled = lambda tokens: [[torch.full((1, 2, 3), torch.nan), {}]]  # type: ignore
    for _ in range(2):
        with pytest.raises(ValueError, match="the text encoder made NaN"):
            encode_prompts(clip, ["a boat"])


def test_outputs_of_the_other_kind_are_blocked() -> None:
    with page() as shown:
        result = run_node(TextEncode, pipeline=Clip(), prompt="a boat", negative_prompt="").result
    conditioning, positive, negative = result
    assert isinstance(conditioning, ExecutionBlocker) and "positive and negative" in conditioning.message
    assert (positive[0][0][0, 0, 0], negative[0][0][0, 0, 0]) == (6, 0)
    assert "Encoder on the CPU" in shown.texts[-1][1]


@pytest.mark.parametrize(("node", "kind"), [(TextEncode, "CLIP"), (VaeDecode, "VAE")])
def test_what_is_neither_is_named(node: Any, kind: str) -> None:
    inputs = {"prompt": "", "negative_prompt": ""} if kind == "CLIP" else {"latent": {"samples": torch.zeros(1)}}
    with pytest.raises(ValueError, match=f"the input is NoneType, neither a Ballast pipeline nor a {kind}"):
        run_node(node, pipeline=None, **inputs)


def test_float32_copy_shares_nothing_and_takes_the_originals() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    module[1].weight = module[0].weight  # tied
    module[0].table, module[0]._v, module[0]._pins = [1], threading.Lock(), {}  # handles cannot be copied
    patcher = Patcher(module)
    original = torch.randn(2).bfloat16()
    patcher.backup["0.bias"] = Kept(original, False)
    double = float32_copy(patcher)
    assert double[0].weight is double[1].weight
    assert {tensor.dtype for tensor in double.state_dict().values()} == {torch.float32}
    assert torch.equal(double[0].bias, original.float())
    assert torch.equal(double[0].weight, module[0].weight.float())
    assert double[0].table == [1] and double[0].table is not module[0].table
    assert not hasattr(double[0], "_v") and hasattr(module[0], "_v")
    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.bfloat16}


# Free VRAM


def test_report_of_free_vram_is_text() -> None:
    models = [
        Held("hidream, transformer", 8 * 2**30, 0),
        Held("AutoencoderKL (ComfyUI, VAE)", 2**20, 2**20),
        Held("lumina2, vae", 2**20, 2**20, "pinned"),
    ]
    totals = [Held("cuda:0", 9 * 2**30, 2**30, "freed 8.00 GB"), Held("cuda:1", 0, 0)]
    assert compose(models, totals).splitlines() == [
        "cuda:0: 9.00 GB -> 1.00 GB, freed 8.00 GB",
        "hidream, transformer: 8.00 GB -> 0 B",
        "AutoencoderKL (ComfyUI, VAE): 1.00 MB -> 1.00 MB",
        "lumina2, vae: 1.00 MB -> 1.00 MB, pinned",
    ]
    assert compose([], []) == "On the CPU: nothing in VRAM."
    assert compose([], [Held("cuda:0", 0, 0)]) == "Nothing to free in VRAM: no model is there."


def test_free_vram_asks_the_host_for_models_of_the_roles(monkeypatch: pytest.MonkeyPatch, evicted: Evictions) -> None:
    clip, vae = Patcher(Encoder()), Patcher(Encoder())
    held = [host.HostModel(clip, "CLIP", "text_encoder", 10), host.HostModel(vae, "VAE", "vae", 20)]
    monkeypatch.setattr(host, "loaded_models", lambda: held)
    models, _ = free(["vae", "other"], host_models=True)
    assert evicted == [vae]
    assert [str(model) for model in models] == [
        "CLIP (ComfyUI, text encoder): 10 B -> 0 B",
        "VAE (ComfyUI, VAE): 20 B -> 0 B",
    ]
    free(["vae"], host_models=False)
    assert evicted == [vae]


# On a real ComfyUI, in this process, whose device is the simulated card


on_host = pytest.mark.host


def encode(clip: Any, prompt: str = "a (red:1.3) boat", negative: str = "") -> tuple[Any, Any, str]:
    with page() as shown:
        result = run_node(TextEncode, pipeline=clip, prompt=prompt, negative_prompt=negative).result
    return result[1], result[2], shown.texts[-1][1]


def by_host(clip: Any, prompt: str) -> Any:
    with torch.inference_mode():
        return clip.encode_from_tokens_scheduled(clip.tokenize(prompt))


def unload() -> None:
    from comfy import model_management as mm

    with torch.inference_mode():
        mm.unload_all_models()


def assert_same(one: Any, other: Any) -> None:
    assert len(one) == len(other) == 1
    assert torch.equal(one[0][0], other[0][0]) and one[0][0].dtype == other[0][0].dtype
    assert one[0][1].keys() == other[0][1].keys()
    for name, value in other[0][1].items():
        same = torch.equal(one[0][1][name], value) if isinstance(value, torch.Tensor) else one[0][1][name] == value
        assert same, name


def clip_skip(clip: Any) -> Any:
    skipping = clip.clone()
    skipping.clip_layer(-2)
    return skipping


def lora(clip: Any, strength: float = 1.0) -> Any:
    """As Load LoRA does it."""
    import comfy.lora
    import comfy.lora_convert

    name = "text_model.encoder.layers.0.mlp.fc1"
    generator = torch.Generator().manual_seed(5)
    weight = clip.cond_stage_model.clip_l.transformer.get_submodule(name).weight
    pieces = {
        "lora_up.weight": torch.randn(weight.shape[0], 4, generator=generator),
        "lora_down.weight": torch.randn(4, weight.shape[1], generator=generator),
        "alpha": torch.tensor(4.0),
    }
    state = {f"lora_te1_{name.replace('.', '_')}.{key}": value for key, value in pieces.items()}
    keys = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, {})
    patches = comfy.lora.load_lora(comfy.lora_convert.convert_lora(state), keys)
    patched = clip.clone()
    assert patched.add_patches(patches, strength)
    return patched


@on_host
@pytest.mark.parametrize("prompt", ["a (red:1.3) boat", "", "word " * 100], ids=["weights", "empty", "long"])
def test_encoding_is_that_of_the_host(prompt: str, card: ModuleType) -> None:
    clip = native_models().clip()
    positive, negative, text = encode(clip, prompt, "a (blue:0.5) car")
    assert card.stats().allocated_bytes == 0, "the host leaves its encoder on the device; the node does not"
    assert card.stats().h2d_bytes > 2**20 and "SD1ClipModel 6.24 MB in VRAM, now gone" in text
    assert_same(positive, by_host(clip, prompt))
    assert_same(negative, by_host(clip, "a (blue:0.5) car"))
    assert card.stats().allocated_bytes > 0


@on_host
def test_variants_are_told_apart_and_each_is_right(card: ModuleType) -> None:
    clip = native_models().clip()
    variants = [clip, clip_skip(clip), lora(clip), lora(clip, 0.5), clip_skip(lora(clip)), native_models().clip(seed=9)]
    for each in [*variants, *variants]:
        assert_same(encode(each, "a boat in variants")[0], by_host(each, "a boat in variants"))
    assert len({tuple(encode(each, "a boat in variants")[0][0][0].flatten().tolist()) for each in variants}) == 6


@on_host
def test_second_time_comes_from_the_cache(card: ModuleType) -> None:
    clip = lora(native_models().clip())
    positive, _, _ = encode(clip, "again and again")
    card.reset_stats()
    again, _, text = encode(clip, "again and again")
    assert text == "from the cache, no encoder loaded"
    assert card.stats().h2d_bytes == card.stats().peak_bytes == 0
    assert_same(again, positive)
    assert_same(again, by_host(clip, "again and again"))
    unload()


@on_host
def test_hooks_are_handed_on(card: ModuleType) -> None:
    import comfy.hooks

    clip = native_models().clip().clone()
    clip.apply_hooks_to_conds = comfy.hooks.HookGroup()
    clip.apply_hooks_to_conds.add(comfy.hooks.WeightHook())
    positive, _, _ = encode(clip, "with hooks")
    assert positive[0][1]["hooks"] is clip.apply_hooks_to_conds
    assert card.stats().allocated_bytes == 0


@on_host
@pytest.mark.parametrize("n", [1, 20, 60, 120])
def test_nothing_stays_after_running_out_of_memory(n: int, card: ModuleType) -> None:
    clip = native_models().clip()
    with card.fail_after(n), pytest.raises(torch.OutOfMemoryError):
        encode(clip, f"fails at {n}")
    assert card.stats().allocated_bytes == 0
    assert_same(encode(clip, f"fails at {n}")[0], by_host(clip, f"fails at {n}"))


@on_host
def test_nothing_stays_after_an_interrupt(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.clip_model
    from comfy import model_management as mm

    clip = native_models().clip()
    forward, layers = comfy.clip_model.CLIPLayer.forward, []

    def press_stop(self: Any, *args: Any, **more: Any) -> Any:
        layers.append(self)
        if len(layers) == 2:
            mm.interrupt_current_processing()
            mm.throw_exception_if_processing_interrupted()
        return forward(self, *args, **more)

    monkeypatch.setattr(comfy.clip_model.CLIPLayer, "forward", press_stop)
    with pytest.raises(mm.InterruptProcessingException):
        encode(clip, "interrupted")
    assert card.stats().allocated_bytes == 0 and not mm.current_loaded_models


# Room for ours


@on_host
@pytest.mark.parametrize(
    ("coming", "leaves"),
    [
        (["transformer", "vae"], "SD1ClipModel"),
        (["text_encoder", "vae"], "BaseModel"),
        (["text_encoder", "transformer"], "AutoencoderKL"),
        (["vae", "text_encoder", "transformer"], "BaseModel"),
        (["transformer", "vae", "text_encoder", "vae"], "SD1ClipModel"),
    ],
)
def test_what_the_graph_needs_last_makes_room_first(coming: list[Any], leaves: str, card: ModuleType) -> None:
    from comfy import model_management as mm

    patchers = [native_models().clip().patcher, native_models().vae().patcher, native_models().unet()]
    with torch.inference_mode():
        mm.load_models_gpu(patchers)
        held = {model.name: model.bytes for model in host.loaded_models()}
        assert len(held) == 3
        free = mm.get_free_memory(mm.get_torch_device()) - mm.extra_reserved_memory()
        host.evict_host_models(free + held[leaves] // 2, mm.get_torch_device(), coming)
    left = {model.name: model.bytes for model in host.loaded_models()}
    assert left.pop(leaves, 0) < held[leaves]
    assert left == {name: held[name] for name in held if name != leaves}, "and nothing else leaves"


# Free VRAM by role


@on_host
def test_free_vram_frees_just_that_role(card: ModuleType) -> None:
    from comfy import model_management as mm

    clip, vae, unet = native_models().clip(), native_models().vae(), native_models().unet()
    (control,) = native_models().control().get_models()
    with torch.inference_mode():
        mm.load_models_gpu([clip.patcher, vae.patcher, unet, control])
    assert {model.name: model.role for model in host.loaded_models()}["ControlNet"] == "other"
    run_node(FreeVram, text_encoders=False, transformers=True, vaes=False, host_models=True)
    assert control.loaded_size() > 0 == unet.loaded_size()
    run_node(FreeVram, text_encoders=False, transformers=False, vaes=True, host_models=True)
    assert control.loaded_size() == 0 < clip.patcher.loaded_size(), "a ControlNet goes with the VAEs"
    with torch.inference_mode():
        mm.load_models_gpu([clip.patcher, vae.patcher, unet])
    everything = {"SD1ClipModel", "AutoencoderKL", "BaseModel"}
    held = {model.name: model.bytes for model in host.loaded_models()}
    assert held.keys() == everything
    off = {"text_encoders": False, "transformers": False, "vaes": False}
    for switched, name in (("vaes", "AutoencoderKL"), ("text_encoders", "SD1ClipModel"), ("transformers", "BaseModel")):
        before = card.stats().allocated_bytes
        assert run_node(FreeVram, **{**off, switched: True}, host_models=False).result[1].count("->") == 1 + len(
            everything
        )
        assert card.stats().allocated_bytes == before
        report = run_node(FreeVram, **{**off, switched: True}).result[1]
        everything.remove(name)
        assert {model.name for model in host.loaded_models()} == everything
        assert before - card.stats().allocated_bytes >= held[name] > 0
        assert f"{name} (ComfyUI, " in report and report.count("-> 0 B") == (1 if everything else 2)
    assert card.stats().allocated_bytes == 0
    assert run_node(FreeVram).result[1] == "Nothing to free in VRAM: no model is there."
