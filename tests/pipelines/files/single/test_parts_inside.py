"""Components that lie in a transformer's file: Anima's text conditioner and LTX-2's connectors; modular bases."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import torch
from ballast.pipelines.files.components import read_components
from ballast.pipelines.files.single.given import GivenFiles
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from modular import modular_folders, newest
from safetensors.torch import load_file, save_file
from single_files.newer_models import NEWER

COMFY = "model.diffusion_model."
State = dict[str, torch.Tensor]


def conditioner(state: State) -> State:
    return {f"llm_adapter.{name}": tensor for name, tensor in state.items()}


def connectors(state: State) -> State:
    """As Lightricks' files have them; the projection of text without the transformer's prefix."""
    made = {}
    for name, tensor in state.items():
        if name.startswith("text_proj_in"):
            made[f"text_embedding_projection.aggregate_embed{name.removeprefix('text_proj_in')}"] = tensor
            continue
        for ours, theirs in (
            ("video_text_proj_in", "text_embedding_projection.video_aggregate_embed"),
            ("audio_text_proj_in", "text_embedding_projection.audio_aggregate_embed"),
            ("_connector.", "_embeddings_connector."),
            ("transformer_blocks", "transformer_1d_blocks"),
            ("norm_q", "q_norm"),
            ("norm_k", "k_norm"),
        ):
            name = name.replace(ours, theirs)
        made[name] = tensor
    return made


_CONNECTORS = {
    "caption_channels": 16, "text_proj_in_factor": 3, "video_connector_num_attention_heads": 2,
    "video_connector_attention_head_dim": 8, "video_connector_num_layers": 2, "audio_connector_num_layers": 2,
    "video_connector_num_learnable_registers": 8, "audio_connector_num_attention_heads": 2,
    "audio_connector_attention_head_dim": 4, "audio_connector_num_learnable_registers": 8,
    "rope_double_precision": False,
}  # fmt: skip
_LTX23 = {
    **_CONNECTORS, "video_gated_attn": True, "audio_gated_attn": True, "per_modality_projections": True,
    "video_hidden_dim": 16, "audio_hidden_dim": 8, "proj_bias": True,
}  # fmt: skip
_CONDITIONER = {
    "source_dim": 16, "target_dim": 16, "model_dim": 16, "num_layers": 2, "num_attention_heads": 2,
    "target_vocab_size": 128,
}  # fmt: skip
CASES = [
    pytest.param("ltx2", "connectors", LTX2TextConnectors, _CONNECTORS, connectors, marks=pytest.mark.long),
    ("ltx23", "connectors", LTX2TextConnectors, _LTX23, connectors),
    ("cosmos", "text_conditioner", diffusers.AnimaTextConditioner, _CONDITIONER, conditioner),
]


def a_base(at: Path, model: str, part: str, made: Any) -> tuple[Path, dict[str, list[str]]]:
    """A folder of two configs, and its index."""
    for name, config in (("transformer", NEWER[model].config()), (part, dict(made.config))):
        (at / name).mkdir(parents=True)
        text = json.dumps({"_class_name": type(made).__name__, **config} if name == part else config)
        (at / name / "config.json").write_text(text, "utf-8")
    library = "ltx2" if part == "connectors" else "diffusers"
    return at, {"transformer": ["diffusers", NEWER[model].cls], part: [library, type(made).__name__]}


@pytest.mark.parametrize(("model", "part", "cls", "config", "named"), CASES)
def test_both_are_read(model: str, part: str, cls: Any, config: dict[str, Any], named: Any, tmp_path: Path) -> None:
    """Bit for bit; the part is refused where the base has no place for it, or where it is not whole."""
    torch.manual_seed(0)
    transformer, made = NEWER[model].build(), cls(**config)
    state = {name: torch.randn_like(value) for name, value in made.state_dict().items()}
    inside = {name if name.startswith("text_embedding") else COMFY + name: t for name, t in named(state).items()}
    whole = {
        COMFY + name: tensor.contiguous() for name, tensor in NEWER[model].original(transformer.state_dict()).items()
    }
    save_file(whole | inside, path := tmp_path / "model.safetensors")
    base, index = a_base(tmp_path / "base", model, part, made)

    def read(**shown: Any) -> dict[str, Any]:
        given = GivenFiles(path)
        found = read_components(base, shown, None, None, given.components(shown))
        given.check_read(found.values())
        return found

    for name, expected in (("transformer", transformer.state_dict()), (part, state)):
        (unit := read(**index)[name].unit("")).load()
        got = unit.module.state_dict()
        assert got.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in got.items()), name
    with pytest.raises(ValueError, match=f"^[^\n]*for which the base has no {part}"):
        read(transformer=index["transformer"])
    lost = sorted(inside)[3]
    save_file(whole | {name: tensor for name, tensor in inside.items() if name != lost}, path)
    with pytest.raises(ValueError, match=f"^[^\n]*lacks 1 weights of {cls.__name__}"):
        read(**index)


@pytest.mark.long
def test_anima_from_its_file(tmp_path: Path, sim: ModuleType) -> None:
    """A modular base without weights of the two: latents of its own call, streamed and resident, no byte left."""
    with newest.resizing():
        _anima(tmp_path, sim)


def _anima(tmp_path: Path, sim: ModuleType) -> None:
    folder = modular_folders.save("anima", tmp_path / "anima")
    latents, _ = modular_folders.stock(folder, 4.0, prompt="a boat", width=48, height=32, num_inference_steps=2)
    state: State = {}
    for part, named in (("transformer", NEWER["cosmos"].original), ("text_conditioner", conditioner)):
        (file,) = (folder / part).glob("*.safetensors")
        state |= {f"net.{name}": tensor.contiguous() for name, tensor in named(load_file(file)).items()}
        file.unlink()
    save_file(state, path := tmp_path / "anima.safetensors")
    pipe = ballast.open_pipeline(path, base=folder, device="sim", cache_dir=tmp_path / "cache")
    cond = pipe.encode("a boat")
    for strategy in ("resident", "streamed"):
        found = pipe.sample(cond, width=48, height=32, steps=2, guidance=4.0, strategy=strategy)
        torch.testing.assert_close(found.float(), latents.float(), atol=1e-5, rtol=0)
        assert sim.stats().allocated_bytes == 0
