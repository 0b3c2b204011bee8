"""Encoders since 2025 from one file, as ComfyUI's repackagings name them, some without the tower for pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ballast.pipelines.files.components import Component
from ballast.pipelines.files.placing import read_whole
from ballast.pipelines.files.single.component import encoder_component
from modular import newest
from safetensors.torch import save_file
from single_files.comfy_folders import write_gguf
from tiny_parts import decoder_sizes

State = dict[str, torch.Tensor]
_IDS = {"image_token_index": 124, "boi_token_index": 125, "eoi_token_index": 126}


def gemma3() -> Any:
    tower = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    text = dict(decoder_sizes(), head_dim=8)
    config = transformers.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, **_IDS)
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral3() -> Any:
    return transformers.Mistral3ForConditionalGeneration(newest._mistral())


def byt5() -> Any:
    config = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(**config, feed_forward_proj="gated-gelu"))


def qwen3_vl() -> Any:
    return newest._qwen3_vl(2)["text_encoder"]


def comfy(state: State) -> State:
    """Without what transformers put around the text model, and the tower by its own name."""
    starts = {
        "model.language_model.": "model.", "model.visual.": "visual.", "model.vision_tower.": "vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }  # fmt: skip
    made = {}
    for name, tensor in state.items():
        start = next((start for start in starts if name.startswith(start)), "")
        made[starts.get(start, "") + name.removeprefix(start)] = tensor
    return made


def text_alone(state: State) -> State:
    return {name: t for name, t in comfy(state).items() if not name.startswith(("vision_", "multi_modal"))}


def opened(module: Any, folder: Path, path: Path) -> Any:
    module.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    base = Component("text_encoder", folder, type(module))
    base.config.update(json.loads((folder / "config.json").read_text("utf-8")))
    return encoder_component(base, path)


def encoder(module: Any, folder: Path, path: Path) -> Any:
    (unit := opened(module, folder, path).unit("")).load()
    return unit.module


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    made = build()
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) / 4
    return made.eval()


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (qwen3_vl, comfy), (gemma3, comfy), (gemma3, text_alone), (byt5, dict),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((qwen3_vl, dict), (gemma3, dict), (mistral3, dict),
        (mistral3, text_alone))),
    ],
)  # fmt: skip
def test_hidden_states_are_those_of_the_folder(
    build: Callable[[], Any], change: Callable[[State], State], tmp_path: Path
) -> None:
    """Bit for bit; an encoder whose file has no tower for pictures has none, and reads texts as the whole one does."""
    whole = seeded(build)
    tensors = change(whole.state_dict())
    kept = {id(tensor): name for name, tensor in reversed(tensors.items())}
    state = {name: tensor.contiguous().clone() for name, tensor in tensors.items() if kept[id(tensor)] == name}
    save_file(state, path := tmp_path / "encoder.safetensors")
    ours = encoder(whole, tmp_path / "text_encoder", path)
    ids = torch.tensor([[3, 5, 7, 9]])
    with torch.inference_mode():
        expected, found = (one(input_ids=ids, output_hidden_states=True) for one in (whole, ours))
    assert all(torch.equal(*pair) for pair in zip(expected.hidden_states, found.hidden_states, strict=True))
    towered = [name for name, _ in ours.named_parameters() if "vision_tower" in name]
    assert bool(towered) == (
        hasattr(whole, "model") and hasattr(whole.model, "vision_tower") and change is not text_alone
    )


def test_half_a_tower_is_refused(tmp_path: Path) -> None:
    whole = seeded(gemma3)
    state = comfy(whole.state_dict())
    state.pop("lm_head.weight")
    lost = next(name for name in state if name.startswith("vision_model.encoder"))
    save_file(
        {name: t.contiguous().clone() for name, t in state.items() if name != lost}, path := tmp_path / "e.safetensors"
    )
    with pytest.raises(ValueError, match=r"^[^\n]*lacks vision_tower.encoder"):
        encoder(whole, tmp_path / "text_encoder", path)


def test_an_encoder_in_gguf_for_one_with_a_tower(tmp_path: Path) -> None:
    """llama.cpp's names have no tower; heads are counted by the config of the text model."""
    whole = seeded(gemma3)
    names = {
        "model.norm.": "output_norm.", "model.embed_tokens.": "token_embd.", "model.layers.": "blk.",
        ".input_layernorm.": ".attn_norm.", ".self_attn.q_norm.": ".attn_q_norm.",
        ".self_attn.k_norm.": ".attn_k_norm.", ".self_attn.q_proj.": ".attn_q.", ".self_attn.k_proj.": ".attn_k.",
        ".self_attn.v_proj.": ".attn_v.", ".self_attn.o_proj.": ".attn_output.",
        ".post_attention_layernorm.": ".post_attention_norm.", ".pre_feedforward_layernorm.": ".ffn_norm.",
        ".post_feedforward_layernorm.": ".post_ffw_norm.", ".mlp.gate_proj.": ".ffn_gate.",
        ".mlp.up_proj.": ".ffn_up.", ".mlp.down_proj.": ".ffn_down.",
    }  # fmt: skip
    made = {}
    for name, tensor in text_alone(whole.state_dict()).items():
        if name == "lm_head.weight":
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        made[name] = tensor + 1 if "norm" in name else tensor
    write_gguf(path := tmp_path / "gemma.gguf", made, "gemma3")
    stored = opened(whole, tmp_path / "text_encoder", path).stored
    expected = {name: t for name, t in whole.named_parameters() if "language_model" in name}
    assert stored.keys() == expected.keys()
    assert all(torch.allclose(read_whole(stored[name]), t, atol=1e-6, rtol=0) for name, t in expected.items())
