"""Train the demo model: a tiny text-to-image pipeline that draws one coloured shape.

    python demo/train.py --out demo/shapes

The result is a folder that diffusers' `Lumina2Pipeline.from_pretrained` loads: an AutoencoderKL (64x64 pictures to
8x8 latents), a Gemma2 text encoder with a word-level tokenizer, and a Lumina2Transformer2DModel (Next-DiT). The
autoencoder is trained first; then the text encoder and the transformer are trained together by flow matching, in
the convention the stock pipeline samples in. Pictures and captions are drawn by `shapes_data`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from shapes_data import FULL_FORMS, LABELS, MIDDLE_WORDS, PARTIAL_FORMS, PLACES, SHAPES, SIZE, caption, render
from shapes_data import COLOUR_NAMES
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
SYSTEM_PROMPT: str = Lumina2Pipeline(None, None, None, None, None).system_prompt
LATENT_CHANNELS = 8
# A few words outside the vocabulary now and then teach the model to pass over words it does not know.
STRANGE_WORDS = ("big", "photo", "nice", "small")


def with_system_prompt(text: str) -> str:
    return f"{SYSTEM_PROMPT} <Prompt Start> {text}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level, lower-cased, punctuation apart, `<bos>` in front so that even the empty prompt has one token."""
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    fields = {"colour": " ".join(COLOUR_NAMES), "back": "", "shape": " ".join(SHAPES), "place": " ".join(PLACES)}
    fields["where"] = "on the in the " + " ".join(MIDDLE_WORDS)
    texts = [with_system_prompt("."), *(form.format(**fields) for form in FULL_FORMS + PARTIAL_FORMS)]
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text.lower())}
    vocab = {word: index for index, word in enumerate([*SPECIAL, *sorted(words)])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    core.pre_tokenizer = split
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=256, padding_side="right", **names)


def build_vae() -> AutoencoderKL:
    levels = 4  # a factor of 8, which the pipeline takes for granted
    return AutoencoderKL(
        sample_size=SIZE,
        block_out_channels=(16, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        shift_factor=0.0,
    )


def build_text_encoder(vocab_size: int) -> Gemma2Model:
    """Three layers; the pipeline reads the states before the last one, so the last one stays as it is drawn."""
    config = Gemma2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=512,
        sliding_window=512,
        attn_logit_softcapping=None,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        use_cache=False,
    )
    return Gemma2Model(config)


def build_transformer(cap_feat_dim: int) -> Lumina2Transformer2DModel:
    model = Lumina2Transformer2DModel(
        sample_size=SIZE // 8,
        patch_size=1,
        in_channels=LATENT_CHANNELS,
        hidden_size=96,
        num_layers=5,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=32,
        ffn_dim_multiplier=0.66,
        axes_dim_rope=(8, 8, 8),
        axes_lens=(300, 64, 64),
        cap_feat_dim=cap_feat_dim,
    )
    for block in [*model.noise_refiner, *model.layers]:
        nn.init.zeros_(block.norm1.linear.bias)
    nn.init.zeros_(model.norm_out.linear_2.weight)
    nn.init.zeros_(model.norm_out.linear_2.bias)
    return model


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def draw_labels(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(LABELS)[torch.randint(len(LABELS), (count,), generator=generator)]


def train_vae(vae: AutoencoderKL, steps: int, batch: int, generator: torch.Generator) -> None:
    vae.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    began = time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, 3e-3)
        pictures = render(draw_labels(batch, generator), generator).contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(pictures).latent_dist
        drawn = vae.decode(posterior.sample(generator)).sample
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        error = (drawn - pictures).abs().mean() + (drawn - pictures).square().mean()
        loss = error + 5e-4 * kl
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"vae {step:5d} error {error.item():.4f} kl {kl.item():.3f} {time.monotonic() - began:.0f} s", flush=True)
    vae.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


@torch.no_grad()
def make_latents(vae: AutoencoderKL, count: int, generator: torch.Generator) -> tuple[list, torch.Tensor]:
    """Labels and their normalised latents; the normalisation goes into the autoencoder's config."""
    labels = draw_labels(count, generator)
    parts = [vae.encode(render(part, generator)).latent_dist.mean for part in labels.split(128)]
    latents = torch.cat(parts)
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    return [tuple(label) for label in labels.tolist()], (latents - shift) * scale


def training_prompt(label: tuple[int, int, int, int], rng: random.Random) -> str:
    if rng.random() < 0.1:
        return ""  # what the pipeline encodes for the unguided half
    words = caption(label, rng).split(" ")
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words)), rng.choice(STRANGE_WORDS))
    return with_system_prompt(" ".join(words))


def train_transformer(
    pipe: Lumina2Pipeline, labels: list, latents: torch.Tensor, steps: int, batch: int, generator: torch.Generator
) -> None:
    """Flow matching; the trained averages of the weights replace the weights at the end."""
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
        # Logit-normal, leaning to the noisy side, where place and shape are decided.
        sigma = torch.sigmoid(torch.randn(batch, generator=generator) * 1.2 + 0.6)
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


def save(pipe: Lumina2Pipeline, out: Path) -> None:
    pipe.save_pretrained(out, safe_serialization=True)
    # Recent transformers save the tokenizer under an internal class name that older releases do not have.
    for path, found in ((out / "model_index.json", "tokenizer"), (out / "tokenizer" / "tokenizer_config.json", "")):
        settings = json.loads(path.read_text())
        if found:
            settings[found] = ["transformers", "PreTrainedTokenizerFast"]
        else:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the pipeline to")
    parser.add_argument("--vae-steps", type=int, default=1600)
    parser.add_argument("--vae-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4000, help="steps of the transformer and text encoder")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pictures", type=int, default=12000, help="pictures encoded for the second part")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    tokenizer = build_tokenizer()
    text_encoder = build_text_encoder(len(tokenizer))
    pipe = Lumina2Pipeline(
        transformer=build_transformer(text_encoder.config.hidden_size),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=build_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )
    for name in ("vae", "text_encoder", "transformer"):
        print(f"{name}: {sum(p.numel() for p in getattr(pipe, name).parameters()):,} parameters", flush=True)
    train_vae(pipe.vae, args.vae_steps, args.vae_batch, generator)
    labels, latents = make_latents(pipe.vae, args.pictures, generator)
    train_transformer(pipe, labels, latents, args.steps, args.batch, generator)
    save(pipe, args.out)


if __name__ == "__main__":
    main()
