"""HiDream-I1's fourth text encoder: Llama 3.1 8B Instruct, which its own repository does not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..components import read_json
from ..conditioning import to_host

REPOSITORY = "meta-llama/Meta-Llama-3.1-8B-Instruct"
FOLDER = "text_encoder_4"
TOKENIZER_FOLDER = "tokenizer_4"
_GATED = f"{REPOSITORY} is gated: accept its licence on its page, and download all of it again."


def find_llama(pipeline: Path, given: str | Path | None, layers: int, channels: int) -> tuple[Path, Path]:
    """The folders of the model and of its tokenizer: those given, else `text_encoder_4` in the pipeline's folder.

    `layers` and `channels` are what the transformer reads. Raises FileNotFoundError or ValueError, in one line, if
    there is none, or not all of it, or another model.
    """
    folder = Path(given).expanduser() if given else pipeline / FOLDER
    if not folder.is_dir():
        where = f"There is no folder {folder}." if given else "Its repository does not hold it."
        raise FileNotFoundError(
            f"{pipeline.name} needs Llama 3.1 8B Instruct as its fourth text encoder. {where} Download {REPOSITORY} "
            f"(accept its licence first) into {pipeline / FOLDER}, or name the folder that it lies in as `llama`."
        )
    config = read_json(folder / "config.json", _GATED)
    kind, has = config.get("model_type"), (config.get("num_hidden_layers", 0), config.get("hidden_size", 0))
    if kind != "llama":
        raise ValueError(f"{folder} holds a {kind or 'nameless'} model, not a Llama. Put {REPOSITORY} there.")
    if has[0] < layers or has[1] != channels:
        raise ValueError(
            f"the Llama in {folder} has {has[0]} layers of {has[1]} channels; this transformer reads {layers} of "
            f"{channels}. Put {REPOSITORY} there."
        )
    for tokenizer in (folder, pipeline / TOKENIZER_FOLDER):
        if (tokenizer / "tokenizer.json").is_file():
            return folder, tokenizer
    raise FileNotFoundError(f"{folder / 'tokenizer.json'} is missing. {_GATED}")


class HiddenStates:
    """Stands between the stock pipeline and `LlamaModel`: has no more computed than what is read, and keeps no more.

    What it answers has, of the states after each layer, those of the numbered layers, on the CPU.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers

    def __call__(self, forward: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        output = forward(*args, **{**kwargs, "output_attentions": False, "use_cache": False})
        after = output.hidden_states[1:]
        return BaseModelOutput(hidden_states=(None, *(to_host(after[layer]) for layer in self.layers)))  # type: ignore[arg-type]


def at_their_places(states: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """States of the numbered layers [len(layers), B, tokens, channels] where the transformer looks for them.

    The places between hold zeros, which it does not read.
    """
    if list(layers) == list(range(len(layers))):
        return states
    every = states.new_zeros(max(layers) + 1, *states.shape[1:])
    every[list(layers)] = states
    return every
