"""HiDream-I1's fourth text encoder: Llama 3.1 8B Instruct, which its own repository does not hold."""

from __future__ import annotations

from pathlib import Path

from ....memory.files import read_json

REPOSITORY = "meta-llama/Meta-Llama-3.1-8B-Instruct"
FOLDER = "text_encoder_4"
TOKENIZER_FOLDER = "tokenizer_4"
_GATED = f"{REPOSITORY} is gated: accept its licence on its page, and download all of it again."


def find_llama(pipeline: Path, given: str | Path | None, layers: int, channels: int) -> tuple[Path, Path]:
    """Return the folders of the model and its tokenizer: those given, else `text_encoder_4` of the pipeline.

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
