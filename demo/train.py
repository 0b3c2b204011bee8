"""Train the demo model: a tiny text-to-image pipeline that draws one coloured shape.

    python demo/train.py --out demo/shapes

The result is a folder that diffusers' `Lumina2Pipeline.from_pretrained` loads: an AutoencoderKL (64x64
pictures to 8x8 latents), a Gemma2 text encoder with a word-level tokenizer, and a Lumina2Transformer2DModel
(Next-DiT), see `shapes_model`. The autoencoder is trained first; then the text encoder and the transformer
are trained together by flow matching, in the convention the stock pipeline samples in. Pictures and captions are
those of `shapes_data`.

The bundled weights took about an hour on two busy CPU cores: one run, then 2400 steps more with `--resume`. The
first run drew its pictures with more jitter and smaller squares than `shapes_data` does now.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, Lumina2Pipeline
from shapes_data import LABELS, Label, caption, render
from shapes_model import build_pipeline, with_system_prompt
from torch import nn

# A few words outside the vocabulary now and then teach the model to pass over words it does not know.
STRANGE_WORDS = ("big", "photo", "nice", "small")


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def draw_labels(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(LABELS)[torch.randint(len(LABELS), (count,), generator=generator)]


def edges(pictures: torch.Tensor) -> torch.Tensor:
    """Differences between neighbours, which weigh little in a plain error but make a picture crisp."""
    return torch.cat([pictures.diff(dim=2).flatten(1), pictures.diff(dim=3).flatten(1)], dim=1)


def train_vae(vae: AutoencoderKL, steps: int, batch: int, decoder_only: bool, generator: torch.Generator) -> None:
    """First the whole autoencoder; then, with the latents settled, the decoder alone for crisp pictures."""
    vae.to(memory_format=torch.channels_last).requires_grad_(True)
    vae.encoder.requires_grad_(not decoder_only)
    weights = [weight for weight in vae.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    began = time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, 2e-3 if decoder_only else 3e-3)
        pictures = render(draw_labels(batch, generator), generator)
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(pictures).latent_dist
        drawn = vae.decode(posterior.sample(generator)).sample
        error = (drawn - pictures).abs().mean() + (drawn - pictures).square().mean()
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        loss = error + (2 * (edges(drawn) - edges(pictures)).abs().mean() if decoder_only else 5e-4 * kl)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            print(f"vae {step:5d} error {error.item():.4f} kl {kl.item():.3f} {seconds:.0f} s", flush=True)
    vae.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


@torch.no_grad()
def make_latents(vae: AutoencoderKL, count: int, generator: torch.Generator) -> tuple[list[Label], torch.Tensor]:
    """Labels and their normalised latents; the normalisation goes into the autoencoder's config."""
    labels = draw_labels(count, generator)
    parts = [vae.encode(render(part, generator)).latent_dist.mean for part in labels.split(128)]
    latents = torch.cat(parts)
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    return [tuple(label) for label in labels.tolist()], (latents - shift) * scale


def training_prompt(label: Label, rng: random.Random) -> str:
    if rng.random() < 0.1:
        return ""  # what the pipeline encodes for the unguided half
    words = caption(label, rng).split(" ")
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words)), rng.choice(STRANGE_WORDS))
    return with_system_prompt(" ".join(words))


def train_transformer(
    pipe: Lumina2Pipeline,
    labels: list[Label],
    latents: torch.Tensor,
    steps: int,
    batch: int,
    generator: torch.Generator,
) -> None:
    """Flow matching; the running averages of the weights replace the weights at the end."""
    transformer, text_encoder = pipe.transformer.train(), pipe.text_encoder.train()
    tables = transformer.rope_embedder.freqs_cis
    transformer.rope_embedder.freqs_cis = [table.to(torch.complex64) for table in tables]  # faster on a CPU
    weights = [*transformer.parameters(), *text_encoder.parameters()]
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.99), weight_decay=0.01)
    rng = random.Random(generator.initial_seed())
    began, recent = time.monotonic(), 0.0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, 1.5e-3)
        picked = torch.randint(len(labels), (batch,), generator=generator)
        clean, noise = latents[picked], torch.randn(batch, *latents.shape[1:], generator=generator)
        sigma = torch.sigmoid(torch.randn(batch, generator=generator) * 1.2 + 0.5)
        mixed = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1))
        tokens = pipe.tokenizer(
            [training_prompt(labels[i], rng) for i in picked.tolist()], padding="longest", return_tensors="pt"
        )
        words = text_encoder(
            tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
        ).hidden_states[-2]
        # Time runs from 0 (noise) to 1 (picture), and the velocity points at the picture.
        velocity = transformer(mixed, 1 - sigma, words, tokens.attention_mask, return_dict=False)[0]
        loss = F.mse_loss(velocity, clean - noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        decay = min(0.998, (step + 1) / (step + 10))
        torch._foreach_lerp_(averages, [weight.detach() for weight in weights], 1 - decay)
        recent += (loss.item() - recent) / min(step + 1, 100)
        if step % 50 == 0 or step == steps - 1:
            print(f"dit {step:5d} loss {recent:.4f} {time.monotonic() - began:.0f} s", flush=True)
    with torch.no_grad():
        for weight, average in zip(weights, averages, strict=True):
            weight.copy_(average)
    transformer.rope_embedder.freqs_cis = tables
    transformer.eval()
    text_encoder.eval()


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Round to 7 significant bits: a zip of the pack is then 2.7 MB smaller, and pictures look the same."""
    mantissa, exponent = torch.frexp(weight)
    return torch.ldexp((mantissa * 2**7).round() / 2**7, exponent)


def save(pipe: Lumina2Pipeline, out: Path) -> None:
    for name in ("vae", "text_encoder", "transformer"):
        for weight in getattr(pipe, name).parameters():
            weight.data = rounded(weight.data)
    pipe.save_pretrained(out, safe_serialization=True)
    # Recent transformers save the tokenizer under an internal class name that older releases do not have.
    name = "PreTrainedTokenizerFast"
    changes: dict[str, dict[str, Any]] = {
        "model_index.json": {"tokenizer": ["transformers", name], "_title": "Shapes demo"},
        "tokenizer_config.json": {"tokenizer_class": name},
    }
    for path in out.rglob("*.json"):
        if path.name != "tokenizer.json":
            settings = json.loads(path.read_text("utf-8")) | changes.get(path.name, {})
            settings.pop("_name_or_path", None)  # where a resumed pipeline came from
            path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the pipeline to")
    parser.add_argument("--resume", type=Path, help="such a folder to train further, all but its encoder")
    parser.add_argument("--vae-steps", type=int, default=1600)
    parser.add_argument("--decoder-steps", type=int, default=1500, help="further steps of the decoder alone")
    parser.add_argument("--vae-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4000, help="steps of the transformer and text encoder")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pictures", type=int, default=12000, help="pictures encoded for the second part")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    pipe = Lumina2Pipeline.from_pretrained(args.resume) if args.resume else build_pipeline()
    for name in ("vae", "text_encoder", "transformer"):
        print(f"{name}: {sum(p.numel() for p in getattr(pipe, name).parameters()):,} parameters", flush=True)
    if not args.resume:
        train_vae(pipe.vae, args.vae_steps, args.vae_batch, False, generator)
    train_vae(pipe.vae, args.decoder_steps, args.vae_batch, True, generator)
    labels, latents = make_latents(pipe.vae, args.pictures, generator)
    train_transformer(pipe, labels, latents, args.steps, args.batch, generator)
    save(pipe, args.out)


if __name__ == "__main__":
    main()
