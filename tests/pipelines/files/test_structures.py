"""Modules are built without weights, whatever their constructors do, and read whole from their files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from ballast.pipelines.files.building import leave_weights
from ballast.pipelines.files.components import read_components, read_model_index
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel


def save_chat_glm(folder: Path) -> dict[str, torch.Tensor]:
    """The text encoder of Kolors, tiny: its constructor skips initialisation, which leaves memory as it was."""
    config = ChatGLMConfig(
        num_layers=2, padded_vocab_size=64, hidden_size=32, ffn_hidden_size=32, kv_channels=8, num_attention_heads=4,
        seq_length=16, layernorm_epsilon=1e-5, rmsnorm=True, add_qkv_bias=True, multi_query_attention=True,
        multi_query_group_num=2, original_rope=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ChatGLMModel(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    model.save_pretrained(folder / "text_encoder")
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "KolorsPipeline", "text_encoder": ["kolors", "ChatGLMModel"]})
    )
    return model.state_dict()


def test_what_a_constructor_does_not_initialise_is_read(tmp_path: Path) -> None:
    expected = save_chat_glm(tmp_path)
    index = {"text_encoder": read_model_index(tmp_path)["text_encoder"]}
    unit = read_components(tmp_path, index, None, None)["text_encoder"].unit("")
    assert all(parameter.is_meta for parameter in unit.module.parameters())
    unit.load()
    found = unit.module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_tied_weights_stay_tied() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    leave_weights(module)
    assert module[0].weight is module[1].weight and all(p.is_meta for p in module.parameters())
    assert not module[2].running_mean.is_meta
