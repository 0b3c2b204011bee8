"""The host's own CLIP and VAE in our nodes: first what needs no host, then on a real ComfyUI with a simulated card."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.host import management as host
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.free import FreeVram, Held, compose, free
from ballast.nodes.native import key as native_key
from ballast.nodes.native.clip import encode_prompts, native_cache, pack, unpack
from ballast.nodes.native.digest import NoDigestError, digest, plain
from ballast.nodes.native.key import encoding_keys, weights_digest
from ballast.nodes.native.vae import float32_copy
from ballast.pipelines.encoding import embedding_cache
from ballast.pipelines.encoding.embedding_cache import EmbeddingCache
from comfy_execution.graph_utils import ExecutionBlocker
from host import page, run_node
from node_runner import native_models
from torch import nn

Kept = namedtuple("Kept", ["weight", "inplace_update"])


class Encoder(nn.Module):
    """As much of a host's encoder as the key looks at."""

    __module__ = "comfy.pretended"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 3, bias=False)
        self.register_buffer("table", torch.arange(3))
        self.zero_out_masked = False
        self.layer_idx = None

    def reset_clip_options(self) -> None:
        self.layer_idx = None

    def encode_token_weights(self, tokens: Any) -> None: ...


class Patcher:
    __module__ = "comfy.pretended"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.patches: dict[str, Any] = {}
        self.patches_uuid = object()
        self.backup: dict[str, Any] = {}
        self.object_patches_backup: dict[str, Any] = {}
        self.object_patches = {"manual_cast_dtype": torch.float32}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.callbacks: dict[str, Any] = {"on_load": {}}
        self.forced_hooks = None
        self.load_device = torch.device("cpu")

    def model_dtype(self) -> torch.dtype:
        return torch.float16

    def loaded_size(self) -> int:
        return 0

    def is_dynamic(self) -> bool:
        return False


class Clip:
    __module__ = "comfy.pretended"

    def __init__(self, seed: int = 0) -> None:
        self.cond_stage_model = Encoder(seed)
        self.patcher = Patcher(self.cond_stage_model)
        self.tokenizer = object()
        self.layer_idx = None
        self.tokenizer_options: dict[str, Any] = {}
        self.encoded: list[Any] = []

    def tokenize(self, text: str) -> dict[str, Any]:
        return {"l": [[(ord(letter), 1.0) for letter in text]]}

    def encode_from_tokens_scheduled(self, tokens: Any) -> list[list[Any]]:
        return [[torch.full((1, 2, 3), float(len(tokens["l"][0]))), {"pooled_output": torch.ones(1, 3)}]]


Encoder.encode_token_weights.__module__ = "comfy.pretended"


def key_of(clip: Clip, text: str = "a boat") -> str | None:
    return encoding_keys(clip, [clip.tokenize(text)])[0]


# The key


def test_key_is_of_content_not_of_objects() -> None:
    assert key_of(Clip()) == key_of(Clip()) is not None
    assert key_of(Clip()) != key_of(Clip(seed=1))
    assert key_of(Clip()) != key_of(Clip(), "a boot")


def add_patch(clip: Clip, value: float = 1.0, strength: float = 1.0) -> None:
    patch = ("diff", (torch.full((3, 3), value),))
    clip.patcher.patches = {"linear.weight": [(strength, patch, 1.0, None, None)]}
    clip.patcher.patches_uuid = object()


CHANGES: dict[str, Callable[[Clip], Any]] = {
    "clip skip": lambda clip: setattr(clip, "layer_idx", -2),
    "tokenizer option": lambda clip: clip.tokenizer_options.update(min_length=1),
    "model option": lambda clip: clip.patcher.model_options.update(scale=2),
    "compute type": lambda clip: clip.patcher.object_patches.update(manual_cast_dtype=torch.bfloat16),
    "attribute": lambda clip: setattr(clip.cond_stage_model, "zero_out_masked", True),
    "weight": lambda clip: clip.cond_stage_model.linear.weight.data.add_(1e-6),
    "buffer": lambda clip: clip.cond_stage_model.table.add_(1),
    "type of a weight": lambda clip: clip.cond_stage_model.half(),
    "training": lambda clip: clip.cond_stage_model.eval(),
    "patch": add_patch,
    "patch of another strength": lambda clip: add_patch(clip, strength=0.5),
    "patch of other values": lambda clip: add_patch(clip, value=2.0),
    "device": lambda clip: setattr(clip.patcher, "load_device", torch.device("cuda")),
}


def test_whatever_changes_the_result_changes_the_key() -> None:
    keys = {"nothing": key_of(Clip())}
    for name, change in CHANGES.items():
        change(clip := Clip())
        keys[name] = key_of(clip)
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys), keys


def test_where_weights_lie_does_not_change_the_key() -> None:
    clip = Clip()
    expected = key_of(clip)
    patched = Clip()
    original = patched.cond_stage_model.linear.weight
    patched.patcher.backup["linear.weight"] = Kept(original.detach().clone(), False)
    patched.cond_stage_model.linear.weight = nn.Parameter(original.detach() + 1)
    assert key_of(patched) == expected, "a LoRA in place, its original set aside"
    clip.cond_stage_model.manual_cast_dtype = torch.float32  # as the patcher sets it, and leaves it behind as None
    assert key_of(clip) == expected
    clip.cond_stage_model.manual_cast_dtype = None
    assert key_of(clip) == expected
    for attribute in ("comfy_cast_weights", "layer_idx", "execution_device", "seed_key", "_v"):
        setattr(clip.cond_stage_model, attribute, object())
        assert key_of(clip) == expected, attribute


class Foreign(nn.Linear):
    """Of another pack, whose version nobody knows here."""


WITHOUT_KEY: dict[str, Callable[[Clip], Any]] = {
    "hooks": lambda clip: setattr(clip.patcher, "forced_hooks", object()),
    "callback": lambda clip: clip.patcher.callbacks.update(on_load={"": [print]}),
    "wrapper": lambda clip: setattr(clip.patcher, "weight_wrapper_patches", {"linear.weight": [print]}),
    "function in options": lambda clip: clip.patcher.model_options.update(wrapper=lambda: None),
    "foreign module": lambda clip: setattr(clip.cond_stage_model, "linear", Foreign(3, 3)),
    "replaced method": lambda clip: setattr(clip.cond_stage_model, "encode_token_weights", lambda tokens: None),
    "forward hook": lambda clip: clip.cond_stage_model.linear.register_forward_hook(lambda *_: None),
    "unknown attribute": lambda clip: setattr(clip, "apply_hooks_to_conds", object()),
    "meta weight": lambda clip: clip.cond_stage_model.to("meta"),
    "patch by function": lambda clip: clip.patcher.patches.update(x=[(1.0, ("diff",), 1.0, None, lambda a: a)]),
}


@pytest.mark.parametrize("name", WITHOUT_KEY)
def test_what_has_no_safe_digest_has_no_key(name: str, tmp_path: Path) -> None:
    WITHOUT_KEY[name](clip := Clip())
    assert key_of(clip) is None
    encoded = encode_prompts(clip, ["a boat"], EmbeddingCache(tmp_path))
    assert encoded.summary.endswith("; not cached")
    assert encoded.conditionings[0][0][0][0, 0, 0] == 6
    assert not list(tmp_path.iterdir())


def test_tokens_may_hold_tensors_but_not_anything() -> None:
    def with_token(token: Any) -> str | None:
        return encoding_keys(Clip(), [{"l": [[(token, 1.0)]]}])[0]

    keys = {
        with_token(token) for token in (7, torch.ones(3), torch.zeros(3), {"type": "embedding", "data": torch.ones(3)})
    }
    assert len(keys) == 4 and None not in keys
    assert with_token(object()) is None


def test_weights_are_read_once_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    digest_of = native_key.tensor_digest
    monkeypatch.setattr(native_key, "tensor_digest", lambda tensor: read.append(tensor) or digest_of(tensor))
    clip = Clip()
    first = weights_digest(clip.patcher)
    assert len(read) == 2
    assert weights_digest(clip.patcher) == first == weights_digest(Patcher(clip.cond_stage_model))
    assert len(read) == 2, "a clone of the patcher has the same model"
    weights_digest(Clip().patcher)
    assert len(read) == 4


def test_types_are_told_apart() -> None:
    values = [1, True, 1.0, "1", [1], (1,), {1}, {1: 1}, {"1": 1}, torch.tensor(1), torch.tensor([1]), torch.int64]
    assert len({digest(value) for value in values}) == len(values)
    assert plain({"b": 1, "a": 2}) == plain({"a": 2, "b": 1})
    assert digest(torch.ones(2, 3).T) == digest(torch.ones(3, 2)), "content, not strides"
    for value in (object(), len, lambda: 1, Foreign, nn.Linear(1, 1), torch.ones(1, device="meta")):
        with pytest.raises(NoDigestError):
            digest(value)


# What is kept


def test_extras_survive_the_disk_exactly(tmp_path: Path) -> None:
    extras = {
        "pooled_output": torch.randn(1, 3).bfloat16(),
        "attention_mask": torch.tensor([[1, 0]]),
        "parts": [torch.randn(2), torch.randn(3).half()],
        "nothing": None,
        "flag": True,
        "count": 3,
        "scale": 0.1 + 0.2,
        "words": "a # b",
    }
    given = [[torch.randn(1, 2, 3).half(), extras]]
    EmbeddingCache(tmp_path).put("key", pack(given, "a prompt"))  # type: ignore[arg-type]
    found = EmbeddingCache(tmp_path).get("key")
    assert found is not None
    (embeddings, back), *more = unpack(found)
    assert not more and list(back) == list(extras)
    assert torch.equal(embeddings, given[0][0]) and embeddings.dtype == torch.float16
    for name, value in extras.items():
        pairs = zip(value, back[name], strict=True) if isinstance(value, list) else [(value, back[name])]
        for before, after in pairs:
            same = torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
            assert same and type(before) is type(after), name
            assert not isinstance(before, torch.Tensor) or before.dtype == after.dtype


@pytest.mark.parametrize("extra", [object(), (1, 2), [1], [], {"a": 1}, torch.ones(1, device="meta")], ids=range(6))
def test_what_cannot_be_stored_is_not_cached(extra: Any, tmp_path: Path) -> None:
    clip = Clip()
    given = [[torch.ones(1, 2, 3), {"hooks": extra}]]
    clip.encode_from_tokens_scheduled = lambda tokens: given  # type: ignore[method-assign]
    assert pack(given) is None
    assert encode_prompts(clip, ["a boat"], EmbeddingCache(tmp_path)).conditionings == [given]
    assert pack(given + given) is None, "a schedule"
    assert not list(tmp_path.iterdir())


class Evictions(list):
    def __call__(self, patchers: list[Any]) -> None:
        self.extend(patchers)


@pytest.fixture
def evicted(monkeypatch: pytest.MonkeyPatch) -> Evictions:
    found = Evictions()
    monkeypatch.setattr(host, "evict", found)
    return found


def test_only_what_is_missing_is_encoded(tmp_path: Path, evicted: Evictions) -> None:
    cache, clip = EmbeddingCache(tmp_path), Clip()
    first = encode_prompts(clip, ["a boat", ""], cache)
    assert evicted == [clip.patcher]
    again = encode_prompts(Clip(), ["a boat", ""], EmbeddingCache(tmp_path))
    assert again.summary == "from the cache, no encoder loaded"
    assert len(evicted) == 1, "and the device is not touched"
    for before, after in zip(first.conditionings, again.conditionings, strict=True):
        assert torch.equal(before[0][0], after[0][0])
        assert torch.equal(before[0][1]["pooled_output"], after[0][1]["pooled_output"])


@pytest.mark.parametrize("error", [RuntimeError("it failed"), KeyboardInterrupt()], ids=repr)
def test_encoder_leaves_when_it_fails(error: BaseException, tmp_path: Path, evicted: Evictions) -> None:
    clip = Clip()

    def fail(tokens: Any) -> Any:
        raise error

    clip.encode_from_tokens_scheduled = fail  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        encode_prompts(clip, ["a boat"], EmbeddingCache(tmp_path))
    assert evicted == [clip.patcher]


def test_values_that_are_not_finite_are_told_and_not_kept(tmp_path: Path) -> None:
    clip = Clip()
    clip.encode_from_tokens_scheduled = lambda tokens: [[torch.full((1, 2, 3), torch.nan), {}]]  # type: ignore
    with pytest.raises(ValueError, match="the text encoder made NaN"):
        encode_prompts(clip, ["a boat"], EmbeddingCache(tmp_path))
    assert not list(tmp_path.iterdir())


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
    keys = {encoding_keys(each, [each.tokenize("a boat")])[0] for each in variants}
    assert len(keys) == len(variants) and None not in keys
    for each in variants:
        assert_same(encode(each, "a boat in variants")[0], by_host(each, "a boat in variants"))
        # The next one is cloned from a model with another's patches in place: the host puts them back.
        assert encoding_keys(each, [each.tokenize("a boat")])[0] in keys
    assert len({tuple(encode(each, "a boat in variants")[0][0][0].flatten().tolist()) for each in variants}) == 6


@on_host
def test_second_time_comes_from_the_cache_also_after_a_restart(card: ModuleType) -> None:
    positive, _, _ = encode(lora(native_models().clip()), "again and again")
    for restart in (False, True):
        if restart:
            embedding_cache._shared.clear()
        card.reset_stats()
        clip = lora(native_models().clip())  # loaded anew: nothing but its content says that it is the same
        again, _, text = encode(clip, "again and again")
        assert text == "from the cache, no encoder loaded"
        assert card.stats().h2d_bytes == card.stats().peak_bytes == 0
        assert_same(again, positive)
        assert_same(again, by_host(clip, "again and again"))
        unload()


@on_host
def test_key_is_the_same_with_patches_in_place(card: ModuleType) -> None:
    clip = native_models().clip()
    patched = lora(clip)
    expected = encoding_keys(clip, [clip.tokenize("a boat")])
    by_host(patched, "a boat")  # which leaves the patched weights on the device
    assert patched.patcher.backup
    native_key._weights.clear()
    assert encoding_keys(clip, [clip.tokenize("a boat")]) == expected


@on_host
def test_textual_inversion_counts_by_its_content(card: ModuleType) -> None:
    clip = native_models().clip()
    keys = []
    for value in (1.0, 2.0):
        tokens = clip.tokenize("a boat")
        tokens["l"][0][1] = (torch.full((64,), value), 1.0)
        keys.append(encoding_keys(clip, [tokens])[0])
    assert keys[0] != keys[1] and None not in keys


@on_host
def test_hooks_are_encoded_but_not_cached(card: ModuleType) -> None:
    import comfy.hooks

    clip = native_models().clip().clone()
    clip.apply_hooks_to_conds = comfy.hooks.HookGroup()
    clip.apply_hooks_to_conds.add(comfy.hooks.WeightHook())
    before = len(list(native_cache().directory.glob("*")))
    positive, _, text = encode(clip, "with hooks")
    assert text.endswith("; not cached")
    assert positive[0][1]["hooks"] is clip.apply_hooks_to_conds
    assert len(list(native_cache().directory.glob("*"))) == before
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
