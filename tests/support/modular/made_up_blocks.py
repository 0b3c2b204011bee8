"""Blocks of a made-up modular pipeline, which Ballast has never heard of, and of some that cannot run in stages."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers import ModularPipeline, ModularPipelineBlocks, SequentialPipelineBlocks
from diffusers.configuration_utils import FrozenDict
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam


class MadeUpModularPipeline(ModularPipeline):
    default_blocks_name = "MadeUpBlocks"


class Block(ModularPipelineBlocks):
    """A block whose code is `work(components, values)`."""

    asks: tuple[ComponentSpec, ...] = ()
    takes: tuple[InputParam, ...] = ()
    gives: tuple[str, ...] = ()

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return list(self.asks)

    @property
    def inputs(self) -> list[InputParam]:
        return list(self.takes)

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name, kwargs_type=BRUSHES if name == "mask" else None) for name in self.gives]

    def __call__(self, components: Any, state: Any) -> Any:
        values = self.get_block_state(state)
        self.work(components, values)
        self.set_block_state(state, values)
        return components, state

    def work(self, components: Any, values: Any) -> None:
        raise NotImplementedError


BRUSHES = "brushes"  # the kind of inputs that the mask is passed on as
TEXT = (
    ComponentSpec("text_encoder", transformers.T5EncoderModel),
    ComponentSpec("tokenizer", transformers.PreTrainedTokenizerFast),
)
DENOISER = (
    ComponentSpec("transformer", diffusers.PixArtTransformer2DModel),
    ComponentSpec("scheduler", diffusers.DPMSolverMultistepScheduler),
)
VAE = (
    ComponentSpec("vae", diffusers.AutoencoderKL),
    ComponentSpec("image_processor", VaeImageProcessor, default_creation_method="from_config"),
)


class Read(Block):
    asks, gives = TEXT, ("words", "mask", "strokes")
    takes = (InputParam("prompt", required=True), InputParam("longest", default=16))

    def work(self, components: Any, values: Any) -> None:
        device, longest = components._execution_device, values.longest
        ids = components.tokenizer(values.prompt, padding="max_length", max_length=longest, return_tensors="pt")
        values.mask = ids.attention_mask.to(device)
        values.words = components.text_encoder(ids.input_ids.to(device), attention_mask=values.mask)[0]
        values.strokes = 1 + len(values.prompt) % 3


class Dip(Block):
    """Prepares the noise: louder by what the text was like."""

    takes = tuple(map(InputParam, ("words", "strokes", "height", "width", "generator")))
    gives = ("latents",)

    def work(self, components: Any, values: Any) -> None:
        rows, columns = ((side or 64) // 8 for side in (values.height, values.width))
        shape, generator = (len(values.words), 4, rows, columns), values.generator
        latents = diffusers.utils.torch_utils.randn_tensor(shape, generator, components._execution_device)
        values.latents = latents * values.strokes


class Paint(Block):
    asks = DENOISER
    takes = (
        *map(InputParam, ("words", "latents")),
        InputParam("num_inference_steps", default=3),
        InputParam(kwargs_type=BRUSHES),
    )
    gives = ("latents",)

    def predict(self, components: Any, values: Any, words: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        made = components.transformer(
            values.latents,
            encoder_hidden_states=words,
            encoder_attention_mask=values.brushes["mask"],
            timestep=time.expand(len(values.latents)),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        return made.chunk(2, 1)[0]

    def work(self, components: Any, values: Any) -> None:
        components.scheduler.set_timesteps(values.num_inference_steps, device=values.latents.device)
        for time in components.scheduler.timesteps:
            guess = self.predict(components, values, values.words, time)
            values.latents = components.scheduler.step(guess, time, values.latents, return_dict=False)[0]


class Show(Block):
    asks, gives = VAE, ("images",)
    takes = (InputParam("latents"), InputParam("output_type", default="pil"))

    def work(self, components: Any, values: Any) -> None:
        pixels = components.vae.decode(values.latents / components.vae.config.scaling_factor, return_dict=False)[0]
        values.images = components.image_processor.postprocess(pixels, output_type=values.output_type)


GUIDER = ComponentSpec(
    "guider",
    ClassifierFreeGuidance,
    config=FrozenDict({"guidance_scale": 3.0}),
    default_creation_method="from_config",
)


class ReadTwice(Read):
    """Reads the negative prompt, too, where it guides."""

    asks, gives = (*TEXT, GUIDER), (*Read.gives, "negative_words")
    takes = (*Read.takes, InputParam("negative_prompt"))

    def work(self, components: Any, values: Any) -> None:
        prompt, values.prompt = values.prompt, values.negative_prompt or ""
        super().work(components, values)
        guides, values.prompt = components.guider.num_conditions > 1, prompt
        values.negative_words = values.words if guides else None
        super().work(components, values)


class PaintGuided(Paint):
    """Takes it that there are words of the negative prompt for guidance."""

    asks, takes = (*DENOISER, GUIDER), (*Paint.takes, InputParam("negative_words"))

    def predict(self, components: Any, values: Any, words: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        guess = super().predict(components, values, words, time)
        if values.negative_words is None:
            return guess
        other = super().predict(components, values, values.negative_words, time)
        return other + (components.guider.guidance_scale + 1) * (guess - other)


class ShowDarker(Show):
    """Changes what its VAE decoded, in a way that no stage knows."""

    def work(self, components: Any, values: Any) -> None:
        super().work(components, values)
        values.images = values.images * 0.5


class PaintAndRead(Paint):
    """Encodes text between its steps."""

    def work(self, components: Any, values: Any) -> None:
        super().work(components, values)
        ids = torch.zeros(1, 4, dtype=torch.long, device=values.latents.device)
        values.latents = values.latents + components.text_encoder(ids)[0].mean()


class ReadToObject(Read):
    """Hands on what is no data."""

    gives = (*Read.gives, "palette")

    def work(self, components: Any, values: Any) -> None:
        super().work(components, values)
        values.palette = object()


class ReadParts(Read):
    """Calls the layers of its encoder by itself."""

    def work(self, components: Any, values: Any) -> None:
        super().work(components, values)
        values.words = values.words + components.text_encoder.encoder.final_layer_norm(values.words)


class ReadDtype(Read):
    """Hands on the dtype of its encoder."""

    gives = (*Read.gives, "dtype")

    def work(self, components: Any, values: Any) -> None:
        super().work(components, values)
        values.dtype = components.text_encoder.dtype


class Rewrite(Block):
    """Writes another prompt, with a model that no folder here has."""

    asks, takes, gives = (ComponentSpec("rewriter", transformers.T5EncoderModel),), (InputParam("prompt"),), ("prompt",)

    def work(self, components: Any, values: Any) -> None:
        values.prompt = components.rewriter(values.prompt)


class MadeUpBlocks(SequentialPipelineBlocks):
    model_name = "made-up"
    block_classes = [Read, Dip, Paint, Show]
    block_names = ["read", "dip", "paint", "show"]


class GuidedBlocks(MadeUpBlocks):
    block_classes = [ReadTwice, Dip, PaintGuided, Show]


class DarkBlocks(MadeUpBlocks):
    block_classes = [Read, Dip, Paint, ShowDarker]


class RereadingBlocks(MadeUpBlocks):
    block_classes = [Read, Dip, PaintAndRead, Show]


class HandingBlocks(MadeUpBlocks):
    block_classes = [ReadToObject, Dip, Paint, Show]


class WordlessBlocks(MadeUpBlocks):
    block_classes = [Dip, Paint, Show]
    block_names = ["dip", "paint", "show"]


class UndecodedBlocks(MadeUpBlocks):
    block_classes = [Read, Dip, Paint]
    block_names = ["read", "dip", "paint"]


class PartlyReadingBlocks(MadeUpBlocks):
    block_classes = [ReadParts, Dip, Paint, Show]


class DtypeBlocks(MadeUpBlocks):
    block_classes = [ReadDtype, Dip, Paint, Show]


class RewritingBlocks(MadeUpBlocks):
    block_classes = [Rewrite, Read, Dip, Paint, Show]
    block_names = ["rewrite", "read", "dip", "paint", "show"]
