"""Few steps, as LoRAs for them need: a shift, no guidance, and both of Wan 2.2's experts with a LoRA each."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from adapters import lora_files

STEPS, SHIFT = 4, 5.0
SIZE = {"width": 32, "height": 32, "steps": STEPS}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@pytest.mark.parametrize(
    ("asked", "scheduler"),
    [
        ({}, diffusers.UniPCMultistepScheduler(flow_shift=SHIFT, **FLOW)),
        pytest.param(
            {"scheduler": "euler"},
            diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            marks=pytest.mark.soak,
        ),
    ],
    ids=["own", "euler"],
)
def test_both_experts_run_as_in_stock(asked: dict[str, Any], scheduler: Any, tmp_path: Path, sim: ModuleType) -> None:
    """The shift decides which of them draws which step."""
    folder = tmp_path / "wan22"
    pipe: Any = tiny.FAMILIES["wan"].build()
    second = type(pipe.transformer).from_config(pipe.transformer.config)
    second.load_state_dict({name: 0.9 * value for name, value in pipe.transformer.state_dict().items()})
    type(pipe)(**pipe.components | {"transformer_2": second}, boundary_ratio=0.9).save_pretrained(folder)
    high, low = (path for path, _ in lora_files.two(folder, tmp_path))
    whole: Any = tiny.DiffusionPipeline.from_pretrained(folder)
    whole.load_lora_weights(str(tmp_path), weight_name=high.name, adapter_name="high")
    whole.load_lora_weights(str(tmp_path), weight_name=low.name, adapter_name="low", load_into_transformer_2=True)
    whole.scheduler = scheduler
    whole.set_progress_bar_config(disable=True)
    given = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": STEPS, "guidance_scale": 1.0}
    generator = torch.Generator().manual_seed(0)
    expected = whole("a red boat", **given, generator=generator, output_type="latent").frames.float()
    ours = ballast.open_pipeline(folder, device="sim", cache_dir=tmp_path)
    ours.set_loras([(high, {"transformer": 1.0}), (low, {"transformer_2": 1.0})])
    cond = ours.encode("a red boat")
    mean, std = (torch.tensor(ours.decoder_config[f"latents_{key}"]).view(1, -1, 1, 1, 1) for key in ("mean", "std"))
    for shift, same in ((SHIFT, True), (None, False)):
        found = ours.sample(cond, **SIZE, frames=5, guidance=1.0, shift=shift, **asked)
        assert torch.allclose((found - mean) / std, expected, atol=1e-5, rtol=1e-5) is same, shift
