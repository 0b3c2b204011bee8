"""Components that lie in the file of a transformer under names of their own: those that prepare its text."""

from __future__ import annotations

from typing import Any

from .layouts import Config, Layout, Shapes


def _nothing(shapes: Shapes, config: Config) -> dict[str, Any]:
    return {}


# By the names that diffusers' indexes have for them. Names of each begin as its `apart` do.
PARTS = {
    "text_conditioner": Layout(
        "Anima's text conditioner",
        ("AnimaTextConditioner",),
        ("llm_adapter.embed.weight",),
        (),
        None,
        _nothing,
        frozenset(),
        renamed=((r"^llm_adapter\.", ""),),
        apart=("llm_adapter.",),
    ),
    "connectors": Layout(
        "LTX-2's text connectors",
        ("LTX2TextConnectors",),
        ("video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q.weight",),
        (),
        None,
        _nothing,
        frozenset(),
        renamed=(
            (r"^(video|audio)_embeddings_connector\.", r"\1_connector."),
            (r"\.transformer_1d_blocks\.", ".transformer_blocks."),
            (r"\.(q|k)_norm\.", r".norm_\1."),
            (r"^text_embedding_projection\.aggregate_embed\.", "text_proj_in."),
            (r"^text_embedding_projection\.(video|audio)_aggregate_embed\.", r"\1_text_proj_in."),
        ),
        apart=("video_embeddings_connector.", "audio_embeddings_connector.", "text_embedding_projection."),
    ),
}
