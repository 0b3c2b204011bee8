"""The parts of the demo model before training: tokenizer, text encoder, transformer and autoencoder."""

from __future__ import annotations

from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
)
from shapes_data import SIZE, all_words
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
SYSTEM_PROMPT: str = Lumina2Pipeline(None, None, None, None, None).system_prompt
LATENT_CHANNELS = 8


def with_system_prompt(text: str) -> str:
    return f"{SYSTEM_PROMPT} <Prompt Start> {text}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level, lower-cased, punctuation apart; `<bos>` gives even the empty prompt one token."""
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    text = with_system_prompt(f"{all_words()} .")
    words = {word for word, _ in split.pre_tokenize_str(text.lower())}
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
    """Three layers, of which the last stays untrained: the pipeline reads the states before it."""
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


def build_pipeline() -> Lumina2Pipeline:
    tokenizer = build_tokenizer()
    text_encoder = build_text_encoder(len(tokenizer))
    return Lumina2Pipeline(
        transformer=build_transformer(text_encoder.config.hidden_size),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=build_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )
