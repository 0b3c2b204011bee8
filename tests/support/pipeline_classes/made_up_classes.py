"""Pipeline classes that no line of Ballast names, as a next diffusers may have them, of the parts of PixArt."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor


class _Painting(DiffusionPipeline):
    """What the two have in common: a loop and its end."""

    def __init__(self, tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
        )
        self.vae_scale_factor = 8
        self.image_processor = VaeImageProcessor(vae_scale_factor=8)

    def read(self, text: str | list[str], device: Any) -> torch.Tensor:
        texts = [text] if isinstance(text, str) else text
        ids = self.tokenizer(texts, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
        return self.text_encoder(ids.input_ids.to(device))[0]

    def predict(self, latents: torch.Tensor, words: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        nothing = {"resolution": None, "aspect_ratio": None}
        made = self.transformer(
            latents, encoder_hidden_states=words, timestep=time.expand(len(latents)), added_cond_kwargs=nothing
        )
        return made.sample.chunk(2, 1)[0]

    def show(self, latents: torch.Tensor, output_type: str) -> Any:
        pixels = self.vae.decode(latents / self.vae.config.scaling_factor, return_dict=False)[0]
        return self.image_processor.postprocess(pixels, output_type=output_type)


class MadeUpPipeline(_Painting):
    """Draws from text, with guidance of its own kind, and draws its noise without a method for it."""

    def encode_prompt(self, prompt: Any, negative_prompt: Any, device: Any, prompt_embeds: Any = None,
                      negative_prompt_embeds: Any = None) -> Any:  # fmt: skip
        if prompt_embeds is None:
            prompt_embeds = self.read(prompt, device)
        if negative_prompt_embeds is None:
            negative_prompt_embeds = self.read(negative_prompt or "", device)
        return prompt_embeds, negative_prompt_embeds

    @torch.no_grad()
    def __call__(
        self,
        prompt: Any = None,
        negative_prompt: Any = None,
        height: int = 64,
        width: int = 64,
        num_inference_steps: int = 3,
        guidance_scale: float = 2.5,
        contrast: float = 1.0,
        generator: Any = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        device = self._execution_device
        words, others = self.encode_prompt(prompt, negative_prompt, device, prompt_embeds, negative_prompt_embeds)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        if latents is None:
            latents = randn_tensor((len(words), 4, height // 8, width // 8), generator, device)
        for time in self.scheduler.timesteps:
            guess = self.predict(latents, words, time) * contrast
            if guidance_scale > 1:
                other = self.predict(latents, others, time)
                guess = other + guidance_scale * (guess - other)
            latents = self.scheduler.step(guess, time, latents, return_dict=False)[0]
        made = self.show(latents, output_type)
        return diffusers.ImagePipelineOutput(images=made) if return_dict else (made,)


class MadeUpEditPipeline(_Painting):
    """Starts from a picture, reads its prompt by a private method that takes no embeddings, and takes no noise."""

    def _encode_prompt(self, prompt: Any, device: Any) -> Any:
        return self.read(prompt, device)

    @torch.no_grad()
    def __call__(
        self,
        prompt: Any,
        image: Any,
        num_inference_steps: int = 3,
        generator: Any = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        device = self._execution_device
        words = self._encode_prompt(prompt, device)
        pixels = self.image_processor.preprocess(image).to(device)
        shown = self.vae.encode(pixels).latent_dist.mode() * self.vae.config.scaling_factor
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        latents = 0.5 * shown + randn_tensor(shown.shape, generator, device)
        for time in self.scheduler.timesteps:
            latents = self.scheduler.step(self.predict(latents, words, time), time, latents, return_dict=False)[0]
        made = self.show(latents, output_type)
        return diffusers.ImagePipelineOutput(images=made) if return_dict else (made,)


class MadeUpSectionsPipeline(diffusers.WanPipeline):
    """Draws and decodes a video in sections of five frames, as Helios does."""

    def __call__(
        self,
        prompt: Any = None,
        negative_prompt: Any = None,
        height: int = 32,
        width: int = 48,
        num_frames: int = 5,
        num_inference_steps: int = 3,
        guidance_scale: float = 5.0,
        generator: Any = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        output_type: str = "np",
        return_dict: bool = True,
        callback_on_step_end: Any = None,
        callback_on_step_end_tensor_inputs: Any = ("latents",),
    ) -> Any:
        given = {name: value for name, value in locals().items() if name not in ("self", "num_frames", "__class__")}
        return [super(MadeUpSectionsPipeline, self).__call__(**given, num_frames=5) for _ in range(0, num_frames, 5)][
            -1
        ]
