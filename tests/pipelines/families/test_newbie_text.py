"""The text side of NewBie: both encoders from files with every known naming, and their tokenizers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import newbie_folders
import pytest
import tiny_parts
import torch
import transformers
from accelerate import init_empty_weights
from ballast.memory.weights.loading import load_stored
from ballast.memory.weights.stored import Stored, stored_tensors
from ballast.memory.weights.unit import ManagedModel
from ballast.pipelines.models.newbie.adapter import AdaptedTower, read_merged
from ballast.pipelines.models.newbie.gemma import (
    GEMMA_3_4B,
    SYSTEM_PROMPT,
    gemma_features,
    gemma_names,
    make_gemma,
    with_system_prompt,
)
from ballast.pipelines.models.newbie.jina import has_adapter, jina_features, jina_names, make_jina
from ballast.pipelines.models.newbie.tokenizers import PieceTokenizer, embedded_tokenizer, folder_tokenizer
from newbie_folders import XML
from places import DATA
from safetensors.torch import load_file, save_file
from torch import nn

CPU = torch.device("cpu")
GOLDEN = DATA / "newbie" / "jina_text_tower.safetensors"

# As published: a config that names no sizes, and remote code for the rest.
JINA_CLIP = {
    "architectures": ["JinaCLIPModel"],
    "auto_map": {"AutoConfig": "jinaai/jina-clip-implementation--configuration_clip.JinaCLIPConfig"},
    "model_type": "jina_clip",
    "text_config": {
        "default_lora_task": "retrieval.query",
        "embed_dim": 1024,
        "hf_model_config_kwargs": {"lora_alpha": 4, "lora_rank": 4, "use_flash_attn": True},
        "hf_model_name_or_path": "jinaai/jina-embeddings-v3",
        "model_type": "jina_clip_text",
    },
}


def built(make: Callable[[Mapping[str, Any]], nn.Module], config: Mapping[str, Any]) -> nn.Module:
    with init_empty_weights(include_buffers=False):
        return make(config).eval()


def loaded(module: nn.Module, stored: Mapping[str, Stored]) -> nn.Module:
    assert stored.keys() == {name for name, _ in module.named_parameters()}
    assert load_stored(module, stored)
    return module


def millions(module: nn.Module) -> int:
    return round(sum(parameter.numel() for parameter in module.parameters()) / 1e6)


def words(*rows: list[int], pad: int = 0) -> Callable[..., dict[str, torch.Tensor]]:
    """A tokenizer that answers these tokens whatever it is asked."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return lambda texts, **_: {"input_ids": ids, "attention_mask": mask}


def stored_as(*names: str, shape: tuple[int, ...] = (6, 2)) -> dict[str, Stored]:
    return {name: Stored(Path("jina.safetensors"), 100, torch.bfloat16, shape) for name in names}


# Gemma


@pytest.fixture(scope="module")
def gemma() -> transformers.PreTrainedModel:
    """A tiny multimodal Gemma 3, with layers that see a window and one that sees all."""
    text = tiny_parts.decoder_sizes(
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_hidden_layers=3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("kind", ["ForConditionalGeneration", "Model", "ForCausalLM", "TextModel"])
def test_gemma_as_transformers_saves_it(gemma: Any, kind: str, tmp_path: Path) -> None:
    whole = gemma.model
    saved = {"ForConditionalGeneration": gemma, "Model": whole, "TextModel": whole.language_model}.get(kind)
    if saved is None:
        saved = transformers.Gemma3ForCausalLM(gemma.config.text_config)
        saved.model.load_state_dict(whole.language_model.state_dict())
    saved.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ours = loaded(built(make_gemma, config), gemma_names(stored_tensors([tmp_path / "model.safetensors"])))
    assert isinstance(ours, transformers.Gemma3TextModel)
    assert not any("vision" in name for name, _ in ours.named_modules())

    tokenizer = words(list(range(4, 20)), [7, 9, 5])
    states, mask = gemma_features(ours, tokenizer, ["", ""], CPU)
    answer = tokenizer([])
    with torch.inference_mode():
        theirs = whole(**answer, output_hidden_states=True).hidden_states[-2]
    assert torch.equal(states, theirs)
    assert torch.equal(mask, answer["attention_mask"]) and mask.dtype == torch.int64


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "language_model.", "model.", ""])
def test_every_prefix_of_gemma(prefix: str) -> None:
    mine = stored_as("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight", "layers.0.scale_weight")
    others = [
        "vision_tower.vision_model.post_layernorm.weight",
        "model.vision_tower.post_layernorm.weight",
        "vision_model.embeddings.patch_embedding.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
        "model.multi_modal_projector.mm_soft_emb_norm.weight",
        "language_model.lm_head.weight",
        "lm_head.weight",
        "spiece_model",
    ]
    assert gemma_names({prefix + name: at for name, at in mine.items()} | stored_as(*others)) == mine


def test_no_name_of_gemma_gets_lost() -> None:
    twice = stored_as("norm.weight", "model.norm.weight", "scaled_fp8")
    assert gemma_names(twice) == twice


def test_gemma_as_published() -> None:
    multimodal = {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    single, whole = built(make_gemma, {}), built(make_gemma, multimodal)
    assert single.config.to_dict() == whole.config.to_dict() == built(make_gemma, GEMMA_3_4B).config.to_dict()
    assert millions(single) == 3880
    assert single.config.layer_types.count("full_attention") == 5
    assert all(parameter.is_meta for parameter in single.parameters())
    buffers = dict(single.named_buffers())
    powers = torch.arange(0, 256, 2) / 256
    assert buffers["embed_tokens.embed_scale"] == torch.tensor(2560**0.5)
    torch.testing.assert_close(buffers["rotary_emb.full_attention_inv_freq"], 1e6**-powers / 8)
    torch.testing.assert_close(buffers["rotary_emb.sliding_attention_inv_freq"], 1e4**-powers)


def test_another_model_than_gemma() -> None:
    with pytest.raises(ValueError, match=r"is of a llama model, not of Gemma 3\. Put google/gemma-3-4b-it there\."):
        make_gemma({"model_type": "llama", "hidden_size": 16})


def test_padding_does_not_change_gemma(gemma: Any) -> None:
    tokenizer = tiny_parts.tokenizer()
    short, long = "a cat", "a cat and a dog, both asleep on one chair"
    ours = gemma.model.language_model
    with torch.inference_mode():
        alone, _ = gemma_features(ours, tokenizer, [short], CPU)
        both, mask = gemma_features(ours, tokenizer, [long, short], CPU)
        cut, cut_mask = gemma_features(ours, tokenizer, [long], CPU, max_length=16)
    assert alone.shape == (1, 8, 16) and both.shape == (2, 48, 16) and mask.shape == (2, 48)
    assert mask.sum(1).tolist() == [len(long) + 1, len(short) + 1]  # and an end
    torch.testing.assert_close(both[1, :6], alone[0, :6])
    assert cut.shape[1] == 16 and cut_mask.all()


def test_system_prompt() -> None:
    assert with_system_prompt("") == ""
    assert with_system_prompt(XML) == SYSTEM_PROMPT + XML
    assert SYSTEM_PROMPT.endswith("user prompts. <Prompt Start> ")
    own = "You are an assistant of another kind. <Prompt Start> a cat"
    assert with_system_prompt(own) == own


# Jina


@pytest.fixture(scope="module")
def jina() -> nn.Module:
    config = json.loads(GOLDEN.with_suffix(".config.json").read_text())
    return loaded(built(make_jina, config), jina_names(stored_tensors([GOLDEN])))


def test_jina_equals_the_reference(jina: nn.Module) -> None:
    golden = load_file(GOLDEN.with_suffix(".forward.safetensors"))
    expected = golden.pop("pooled")
    with torch.inference_mode():
        pooled = jina_features(jina, lambda texts, **_: golden, ["", ""], CPU)
    assert (pooled - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "prefix", ["text_model.transformer.roberta.", "text_model.transformer.", "roberta.", "model.", ""]
)
def test_every_prefix_of_jina(jina: nn.Module, prefix: str) -> None:
    published = stored_tensors([GOLDEN])
    others = stored_as("vision_model.blocks.0.norm1.weight", "visual_projection.weight", "logit_scale", "spiece_model")
    names = jina_names({prefix + name: at for name, at in published.items()} | others)
    assert names == jina_names(published)
    assert jina_names(names) == names  # transformers' own pass
    assert jina_names({prefix + name: at for name, at in names.items()}) == names


def test_three_projections_in_one() -> None:
    (name, at), *_ = stored_as("encoder.layers.0.mixer.Wqkv.weight").items()
    assert jina_names({name: at}) == {
        f"layers.0.self_attn.{part}_proj.weight": replace(at, offset=100 + 8 * i, shape=(2, 2))
        for i, part in enumerate("qkv")
    }
    with pytest.raises(ValueError, match=r"jina\.safetensors has layers\.0\.mixer\.Wqkv\.weight with 7 rows"):
        jina_names(stored_as(name, shape=(7, 2)))


def test_no_name_of_jina_gets_lost() -> None:
    strange = ["text_projection.weight", "pooler.dense.weight", "model.emb_ln.scale_weight"]
    assert list(jina_names(stored_as(*strange))) == [*strange[:2], "embeddings.LayerNorm.scale_weight"]
    twice = stored_as("emb_ln.bias", "model.emb_ln.bias")
    assert jina_names(twice).keys() == {"embeddings.LayerNorm.bias", "model.emb_ln.bias"}


@pytest.mark.parametrize("config", [{}, JINA_CLIP], ids=["none", "published"])
def test_jina_as_published(config: Mapping[str, Any]) -> None:
    module = built(make_jina, config)
    assert millions(module) == 558
    assert all(parameter.is_meta for parameter in module.parameters())
    buffers = dict(module.named_buffers())
    torch.testing.assert_close(buffers["rotary_emb.inv_freq"], 20000 ** -(torch.arange(0, 64, 2) / 64))


def test_sizes_of_jina_under_the_names_of_the_remote_code() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "rotary_emb_base": 100}
    module = built(make_jina, {"text_config": {"hf_model_config_kwargs": sizes}})
    assert len(module.layers) == 2
    torch.testing.assert_close(dict(module.named_buffers())["rotary_emb.inv_freq"], 100 ** -(torch.arange(0, 8, 2) / 8))


def test_transformers_without_jina(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(ImportError, match=r"needs transformers 5\.4 or newer"):
        make_jina({})


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_padding_does_not_change_jina(jina: nn.Module, dtype: torch.dtype, near: float) -> None:
    module = make_jina(jina.config.to_dict()).eval()
    module.load_state_dict(jina.state_dict())
    module.to(dtype)
    short, long = [0, 17, 5, 2], [0, *range(10, 40), 2]
    with torch.inference_mode():
        alone = jina_features(module, words(short, pad=1), [""], CPU)
        both = jina_features(module, words(long, short, pad=1), ["", ""], CPU)
        empty = jina_features(module, words([0, 2], long, pad=1), ["", ""], CPU)
    assert both.shape == (2, 32) and both.dtype == dtype and torch.isfinite(empty).all()
    torch.testing.assert_close(both[1], alone[0], atol=near, rtol=near)
    torch.testing.assert_close(both[0], empty[1], atol=near, rtol=near)


# Jina's adapters


TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
RANK = 2
WRAPPED = "text_model.transformer.roberta."
WQKV = f"{WRAPPED}encoder.layers.0.mixer.Wqkv"


def adapted(count: int, prefix: str = WRAPPED, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The golden tower with so many random adapters, as it is published: with a tower for pictures beside it."""
    generator = torch.Generator().manual_seed(1)
    found = {"logit_scale": torch.ones(()), "vision_model.blocks.0.attn.q_proj.weight": torch.ones(4, 4)}
    for name, weight in load_file(GOLDEN).items():
        if not name.endswith(".weight") or "norm" in name or "emb_ln" in name:
            found[prefix + name] = weight
            continue
        (out, into), stem = weight.shape, f"{prefix}{name.removesuffix('weight')}parametrizations.weight"
        shapes = {"A": (RANK, into), "B": (out, RANK)}
        if "_embeddings" in name:
            shapes = {"A": (out, RANK), "B": (RANK, into)}
        found[f"{stem}.original"] = weight
        for factor, shape in shapes.items():
            found[f"{stem}.0.lora_{factor}"] = 0.1 * torch.randn(count, *shape, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def merged(tensors: Mapping[str, torch.Tensor], index: int, scale: float) -> dict[str, torch.Tensor]:
    """By the closed form: W + BA for a layer, W + AB for a table."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, end = name.partition(".parametrizations.weight.")
        if end == "original":
            a, b = (tensors[f"{stem}.parametrizations.weight.0.lora_{factor}"][index].float() for factor in "AB")
            form = "or,ri->oi" if "_embeddings" not in stem else "ri,or->oi"
            found[f"{stem}.weight"] = tensor.float() + scale * torch.einsum(form, b, a)
        elif not end:
            found[name] = tensor.float()
    return found


def tower_config(**facts: Any) -> dict[str, Any]:
    """Of all of Jina CLIP, as published, with the sizes of the golden tower."""
    sizes = json.loads(GOLDEN.with_suffix(".config.json").read_text())
    return {"text_config": {"default_lora_task": "retrieval.query", "hf_model_config_kwargs": sizes | facts}}


def empty_tower(dtype: torch.dtype = torch.float32) -> nn.Module:
    return built(make_jina, tower_config()).to(dtype)


def pooled(module: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return jina_features(module, words([0, *range(10, 40), 2], [0, 17, 5, 2], pad=1), ["", ""], CPU)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("prefix", [WRAPPED, "text_model.transformer."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_for_texts_is_merged(count: int, prefix: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, file = adapted(count, prefix, dtype), tmp_path / "model.safetensors"
    save_file(tensors, file)
    assert has_adapter(stored_tensors([file])) and not has_adapter(stored_tensors([GOLDEN]))
    config = tower_config(lora_adaptations=TASKS[:count], lora_alpha=4, lora_rank=RANK)
    module = read_merged([file], empty_tower, config)

    save_file(merged(tensors, 0, 2), tmp_path / "merged.safetensors")
    expected = loaded(empty_tower(), jina_names(stored_tensors([tmp_path / "merged.safetensors"])))
    plain = loaded(empty_tower(), jina_names(stored_tensors([GOLDEN])))
    torch.testing.assert_close(pooled(module), pooled(expected), atol=1e-6, rtol=1e-6)
    assert not torch.allclose(pooled(module), pooled(plain), atol=0.1)


@pytest.mark.parametrize(
    ("facts", "index", "scale"),
    [
        ({}, 0, 1),
        ({"lora_alpha": 4, "lora_rank": 4}, 0, 1),
        ({"lora_alpha": 1, "lora_rank": 4}, 0, 0.25),
        ({"lora_adaptations": TASKS}, 0, 1),
        ({"lora_adaptations": TASKS, "default_lora_task": "text-matching"}, 4, 1),
        ({"lora_adaptations": TASKS[::-1]}, 4, 1),
    ],
)
def test_which_adapter_and_how_strong(facts: dict[str, Any], index: int, scale: float, tmp_path: Path) -> None:
    tensors = adapted(5)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = merged(tensors, index, scale)[f"{WQKV}.weight"].chunk(3)
    top = {key: facts[key] for key in facts if key == "lora_adaptations"}  # or in the config of the whole
    for config in (tower_config(**facts), tower_config(**{k: v for k, v in facts.items() if k not in top}) | top):
        found = read_merged([tmp_path / "model.safetensors"], empty_tower, config).state_dict()
        for part, weight in zip("qkv", expected, strict=True):
            torch.testing.assert_close(found[f"layers.0.self_attn.{part}_proj.weight"], weight, atol=1e-6, rtol=0)


def test_merged_weights_are_cast_and_ordinary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ballast.pipelines.models.newbie.adapter._ROWS", 7)
    tensors, file = adapted(1), tmp_path / "model.safetensors"
    halves = sorted(tensors)[::2]  # in two files, the factors of most apart
    save_file({name: tensors.pop(name) for name in halves}, tmp_path / "first.safetensors")
    save_file(tensors, file)
    with torch.inference_mode():
        module = read_merged([tmp_path / "first.safetensors", file], lambda: empty_tower(torch.bfloat16), {})
    table = merged(adapted(1), 0, 1)[f"{WRAPPED}embeddings.word_embeddings.weight"]
    found = module.state_dict()["embeddings.word_embeddings.weight"]
    torch.testing.assert_close(found.float(), table, atol=0, rtol=2**-8)
    for tensor in (*module.parameters(), *module.buffers()):
        assert not (tensor.is_meta or tensor.is_inference() or tensor.requires_grad)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_an_adapted_tower_comes_and_goes(tmp_path: Path) -> None:
    file, config = tmp_path / "model.safetensors", tower_config(lora_alpha=4, lora_rank=RANK)
    save_file(adapted(1), file)
    plain = ManagedModel(
        "text_encoder_2", "text_encoder", empty_tower, lambda: read_merged([file], empty_tower, config)
    )
    tower = AdaptedTower(
        "text_encoder_2", "text_encoder", (file,), partial(make_jina, config), jina_names, config=config
    )
    expected = pooled(read_merged([file], empty_tower, config))
    for unit in (plain, tower.unit("x")):
        assert unit.source() is None
        for _ in range(2):
            assert unit.load() == unit.size_bytes > 0
            assert torch.equal(pooled(unit.module), expected)
            assert unit.drop() == unit.size_bytes and all(parameter.is_meta for parameter in unit.module.parameters())


def grown(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], -1)


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        (f"{WQKV}.parametrizations.weight.0.lora_A", grown, "do not fit a weight of [96, 32]"),
        (f"{WQKV}.parametrizations.weight.0.lora_B", grown, "do not fit a weight of [96, 32]"),
        (f"{WQKV}.parametrizations.weight.0.lora_A", lambda tensor: tensor[0], "do not fit a weight of [96, 32]"),
        (f"{WQKV}.parametrizations.weight.0.lora_B", lambda tensor: tensor[:0], "do not fit a weight of [96, 32]"),
        (f"{WQKV}.parametrizations.weight.0.lora_A", None, f"without the rest of {WQKV}.weight"),
        (f"{WQKV}.parametrizations.weight.original", None, f"without the rest of {WQKV}.weight"),
        (f"{WQKV}.parametrizations.weight.original", grown, "layers.0.self_attn.q_proj.weight as [32, 64] where"),
        (f"{WQKV}.parametrizations.weight.original", torch.Tensor.char, "as torch.int8, which is quantized"),
        (f"{WQKV}.bias", None, "lacks 3 weights of JinaEmbeddingsV3Model, such as layers.0.self_attn.k_proj.bias"),
        (f"{WQKV}.scale", torch.ones(3), "has no place for, such as layers.0.self_attn.k_proj.scale"),
        (f"{WQKV}.weight", torch.ones(96, 32), f"{WQKV}.weight"),
        (
            f"{WQKV}.parametrizations.weight.0.magnitude",
            torch.ones(1),
            "magnitude, of an adapter that cannot be merged",
        ),
        (
            f"{WQKV}.parametrizations.bias.original",
            torch.ones(96),
            "bias.original, of an adapter that cannot be merged",
        ),
    ],
)
def test_adapters_that_do_not_fit(key: str, change: Any, words: str, tmp_path: Path) -> None:
    tensors, file = adapted(2), tmp_path / "model.safetensors"
    changed = change(tensors[key]) if callable(change) else change
    tensors = {name: tensor for name, tensor in tensors.items() if name != key}
    save_file(tensors if changed is None else {**tensors, key: changed}, file)
    with pytest.raises(ValueError) as error:
        read_merged([file], empty_tower, tower_config())
    assert words in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_an_adapter_that_the_file_lacks(tmp_path: Path) -> None:
    save_file(adapted(2), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has text-matching not among the 2 adapters of .*model\.safetensors\."):
        config = tower_config(lora_adaptations=TASKS, default_lora_task="text-matching")
        read_merged([tmp_path / "model.safetensors"], empty_tower, config)


@pytest.mark.parametrize("end", ["original", "0.lora_A"])
def test_an_adapter_is_not_ignored(end: str) -> None:
    name = f"{WQKV}.parametrizations.weight.{end}"
    with pytest.raises(ValueError) as error:
        jina_names(stored_as(f"{WRAPPED}emb_ln.bias", name))
    message = str(error.value)
    assert name in message and "jina_clip_v2_bf16.safetensors" in message and "\n" not in message


# Tokenizers


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    saved = tiny_parts.tokenizer()
    saved.padding_side = "left"
    saved.save_pretrained(tmp_path)
    # Beside a model that asks for remote code, as Jina CLIP does, which is not run.
    (tmp_path / "config.json").write_text(json.dumps(JINA_CLIP))
    tokenizer = folder_tokenizer(tmp_path)
    tokens = tokenizer(["ab", ""], padding=True, pad_to_multiple_of=8, return_tensors="pt")
    assert tokens["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1] + [0] * 7]
    assert tokens["input_ids"][1].tolist() == [3] + [1] * 7


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        folder_tokenizer(tmp_path)


@pytest.fixture
def gemma_pieces(tmp_path: Path) -> PieceTokenizer:
    names = {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>", "add_dummy_prefix": False}
    return embedded_tokenizer(
        newbie_folders.piece_file(tmp_path / "g.safetensors", pad_id=0, eos_id=1, bos_id=2, unk_id=3, **names)
    )


@pytest.fixture
def jina_pieces(tmp_path: Path) -> PieceTokenizer:
    return embedded_tokenizer(
        newbie_folders.piece_file(tmp_path / "j.safetensors", bos_id=0, pad_id=1, eos_id=2, unk_id=3)
    )


def test_gemma_tokenizer_in_a_file(gemma_pieces: PieceTokenizer) -> None:
    texts = ["the cat", "", XML, "a<end_of_turn><image_soft_token>cat"]
    tokens = gemma_pieces(texts, padding=True, pad_to_multiple_of=8, max_length=512, truncation=True)
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    assert ids.dtype == mask.dtype == torch.int64 and ids.shape == mask.shape and ids.shape[1] % 8 == 0
    plain = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    encode = gemma_pieces.pieces.encode
    assert plain[0] == [2, *encode("the cat")] and plain[1] == [2]
    assert gemma_pieces.pieces.decode(plain[2][1:]) == " ".join(XML.split())
    assert plain[3] == [2, *encode("a"), 106, 262144, *encode("cat")]
    assert not ids[~mask.bool()].any()


def test_jina_tokenizer_in_a_file(jina_pieces: PieceTokenizer) -> None:
    text = "the cat and the dog"
    tokens = jina_pieces([text, ""], max_length=2048)
    assert tokens["input_ids"][0].tolist() == [0, *jina_pieces.pieces.encode(text), 2]
    assert tokens["input_ids"][1].tolist()[:3] == [0, 2, 1] and tokens["attention_mask"][1].sum() == 2
    cut = jina_pieces([text], max_length=4)["input_ids"][0].tolist()
    assert cut == [0, *jina_pieces.pieces.encode(text)[:2], 2]


def test_numbers_that_the_models_do_not_know(tmp_path: Path) -> None:
    path = newbie_folders.piece_file(
        tmp_path / "x.safetensors", unk_id=0, bos_id=1, eos_id=2
    )  # XLM-RoBERTa's original ones
    with pytest.raises(ValueError, match=r"x\.safetensors is neither Gemma 3's nor Jina CLIP v2's"):
        embedded_tokenizer(path)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors holds no tokenizer"):
        embedded_tokenizer(tmp_path / "x.safetensors")


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="the sentencepiece package is not installed")
    save_file({"spiece_model": torch.full((64,), 255, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged\. Download the file again\."):
        embedded_tokenizer(tmp_path / "x.safetensors")


def test_without_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"spiece_model": torch.zeros(4, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"needs the sentencepiece package: pip install sentencepiece"):
        embedded_tokenizer(tmp_path / "x.safetensors")
