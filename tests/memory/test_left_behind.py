"""0 bytes on the card after every stage, failed or not, by reference counting alone: no collector runs here."""

from __future__ import annotations

import gc
import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
import transformers
from ballast.memory import DoesNotFitError, manager
from ballast.memory.simulated import Transfer, watch
from diffusers import DiffusionPipeline
from diffusers.guiders import AdaptiveProjectedGuidance
from diffusers.models.transformers.transformer_motif_video import MotifVideoTransformer3DModel
from fault_points import STAGES, FaultError
from tiny_parts import MULTIMODAL_ROPE, TEXT_TOKENS, decoder_sizes, flow, t5, tokenizer
from torch.nn.modules.module import register_module_forward_hook


def skyreels_df() -> DiffusionPipeline:
    """Copies its scheduler, for each latent frame where it runs asynchronously."""
    return diffusers.SkyReelsV2DiffusionForcingPipeline(
        scheduler=diffusers.UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True),
        vae=wan_vae(),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.SkyReelsV2Transformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=64,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ),
    )


def hunyuan_image() -> DiffusionPipeline:
    """Its guiders keep the momentum of the steps before."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(
        text_config=decoder_sizes(layers=3, rope_parameters=MULTIMODAL_ROPE), vision_config=vision, vocab_size=128
    )
    return diffusers.HunyuanImagePipeline(
        scheduler=flow(7.0),
        vae=diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            scaling_factor=0.476986,
            spatial_compression_ratio=8,
            sample_size=128,
        ),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer(2048),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
        guider=diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1),
        ocr_guider=diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1),
        transformer=diffusers.HunyuanImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=(1, 1),
            text_embed_dim=16,
            text_embed_2_dim=32,
            rope_axes_dim=(4, 4),
        ),
    )


def motif_video() -> DiffusionPipeline:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    text = transformers.T5Gemma2TextConfig(
        hidden_size=32, intermediate_size=64, vocab_size=128, dropout_rate=0.0, **sizes
    )
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.T5Gemma2EncoderConfig(text_config=text, vision_config={"image_size": 28, **vision})
    return diffusers.MotifVideoPipeline(
        scheduler=flow(7.0),
        vae=wan_vae(),
        text_encoder=transformers.T5Gemma2Encoder(config),
        tokenizer=tokenizer(),
        guider=AdaptiveProjectedGuidance(),
        transformer=MotifVideoTransformer3DModel(
            in_channels=33,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_single_layers=1,
            patch_size=1,
            patch_size_t=1,
            text_embed_dim=32,
            rope_axes_dim=(4, 4, 4),
        ),
    )


def wan_vae() -> diffusers.AutoencoderKLWan:
    return diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


OTHERS = {"skyreels_df": skyreels_df, "hunyuan_image": hunyuan_image, "motif_video": motif_video}
# Those that left something once, and all with BALLAST_SOAK=1.
NAMES = [*(tiny.FAMILIES if os.environ.get("BALLAST_SOAK") else ("lumina2", "hunyuan_video15", "wan")), *OTHERS]

SOON, LATER = ("lumina2",), dict.fromkeys(("hunyuan_image", "skyreels_df"), pytest.mark.long)


@pytest.fixture(autouse=True)
def uncollected(sim: ModuleType) -> Iterator[None]:
    """No garbage collection, those that the pack asks for included."""
    gc.collect()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield
    gc.enable()


@pytest.fixture(scope="module")
def other_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("others")

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            tiny.seeded(OTHERS[name])().save_pretrained(root / name, safe_serialization=True)
        return root / name

    return folder


class Stages:
    """The stages of an open pipeline, each run on what an undisturbed one before it gave."""

    def __init__(self, name: str, folder: Path) -> None:
        self.pipe = ballast.open_pipeline(folder, device="sim")
        if name in OTHERS:
            self.encoding = {} if name == "hunyuan_image" else {"max_sequence_length": TEXT_TOKENS}
            self.sampling = {"width": 32, "height": 32, "frames": 9 if self.pipe.is_video else None}
        else:
            family = tiny.FAMILIES[name]
            width, height = family.size
            self.encoding = family.encode_kwargs
            self.sampling = {"width": width, "height": height, "frames": family.frames, **family.call_kwargs}
        self.negative = "grey" if self.pipe.takes_negative else ""
        self.given: dict[str, Any] = {}

    def run(self, stage: str, **more: Any) -> Any:
        if stage == "encode":
            self.pipe.cache.clear()
            return self.pipe.encode("a red boat", self.negative, **self.encoding)
        if stage == "sample":
            return self.pipe.sample(self.given["encode"], steps=2, **self.sampling, **more)
        return self.pipe.decode(self.given["sample"])

    def error_of(self, stage: str, **more: Any) -> BaseException | None:
        """What a stage raises."""
        try:
            self.run(stage, **more)
        except BaseException as error:
            return error
        return None


@contextmanager
def at_call(number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Do something in the midst of a stage: after the n-th module has run, 0 for never. Counts them."""
    calls = [0]

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            act()

    handle = register_module_forward_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


def raising(error: type[BaseException]) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error("here")  # the line that fails

    return fail


@pytest.mark.parametrize(
    "name", [name if name in SOON else pytest.param(name, marks=LATER.get(name, pytest.mark.soak)) for name in NAMES]
)
def test_nothing_is_left_after_any_stage(
    name: str,
    tiny_folders: Callable[[str], Path],
    other_folders: Callable[[str], Path],
    sim: ModuleType,
) -> None:
    stages = Stages(name, (other_folders if name in OTHERS else tiny_folders)(name))
    for stage in STAGES:
        stages.given[stage] = stages.run(stage)
        assert sim.stats().allocated_bytes == 0, stage
        with at_call(0, lambda: None) as calls:
            stages.run(stage)
        middle = calls[0] // 2
        assert middle > 3

        for fault in (FaultError, KeyboardInterrupt):
            with at_call(middle, raising(fault)):
                error = stages.error_of(stage)
            assert type(error) is fault
            assert sim.stats().allocated_bytes == 0, (stage, fault)
            text = "".join(traceback.format_exception(error))
            assert 'raise error("here")  # the line that fails' in text
            assert "in _call_impl" in text

        with at_call(middle, lambda: sim.enable(total=1)):
            error = stages.error_of(stage)
        assert sim.stats().allocated_bytes == 0, (stage, "out of memory")
        assert isinstance(error, DoesNotFitError) or (error is None and stage == "decode")  # on the CPU
        sim.enable(total="4GB")

    for fault in (FaultError, KeyboardInterrupt) if name != "skyreels_df" else ():  # where copied schedulers step
        error = stages.error_of("sample", on_step=raising(fault))
        assert type(error) is fault
        assert sim.stats().allocated_bytes == 0, ("on_step", fault)
        assert 'raise error("here")  # the line that fails' in "".join(traceback.format_exception(error))
    manager("sim").free()
    assert sim.stats().allocated_bytes == 0
    pipe = weakref.ref(stages.pipe)
    del stages, error
    assert pipe() is None


@pytest.mark.parametrize("stage", STAGES)
def test_error_at_the_very_end_of_a_stage(stage: str, tiny_folders: Callable[[str], Path], sim: ModuleType) -> None:
    """While its result is copied to the CPU, and once its units leave."""
    stages = Stages("lumina2", tiny_folders("lumina2"))
    for each in STAGES[: STAGES.index(stage)]:
        stages.given[each] = stages.run(each)

    def fail(copy: Transfer) -> None:
        if copy.direction == "d2h":
            raise KeyboardInterrupt

    with watch(fail):
        copying = stages.error_of(stage)
    assert type(copying) is KeyboardInterrupt
    assert sim.stats().allocated_bytes == 0

    def leave(*args: Any) -> None:
        held = torch.ones(3, device="sim")
        whole(*args)
        raise FaultError(held.shape)

    whole = stages.pipe.manager.end_stage
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.pipe.manager, "end_stage", leave)
        leaving = stages.error_of(stage)
    assert type(leaving) is FaultError
    assert sim.stats().allocated_bytes == 0
    assert not manager("sim").timeline.is_in_stage, "what others do is seen again"
