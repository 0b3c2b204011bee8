"""Configs of published models that come with the pack, since single files lack them.

`facts/models` has a folder for each model, in diffusers' layout and without weights; `facts/parts` the configs that
several share. Beside what diffusers reads, an index says under `_file` which files are of that model, under `_parts`
where each config lies and what its file is usually called, under `_tokenizers` the kind and settings of each, under
`_processors` where the settings of each lie and which tokenizer it has, and under `_unprojected` the encoders whose
projection does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ....memory.files import read_json
from ..components import read_model_index
from ..trust import component_class
from .component import difference
from .contents import SingleFile

FACTS = Path(__file__).parent / "facts"
# What people call the kinds of tokenizers.
KINDS = {
    "clip": "CLIP",
    "t5": "T5",
    "pile_t5": "Pile-T5",
    "umt5": "UMT5",
    "qwen": "Qwen",
    "llama": "Llama 3",
    "gemma": "Gemma 2",
}

_ENCODERS = {
    "clip_l": "CLIP-L",
    "clip_g": "CLIP-G",
    "t5": "T5-XXL",
    "umt5": "UMT5-XXL",
    "pile_t5": "Pile-T5-XL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3": "Qwen3",
    "llama": "Llama 3.1",
    "llava": "LLaVA of Llama 3",
    "gemma": "Gemma 2",
}


def published_folder(single: SingleFile, two: bool) -> Path:
    """Return the folder of facts of the model whose transformer the file is: one of `two`, or the only one.

    Models of the same sizes are told by the file's name. ValueError, in one line, where none is known.
    """
    known = []
    for folder in sorted((FACTS / "models").iterdir()):
        index = read_model_index(folder)
        told = index["_file"]
        if told["title"] != single.title:
            continue
        config = read_json(folder / "transformer" / "config.json")
        fits = difference(component_class(*index["transformer"]), config, single) is None
        if fits and two == told.get("two", False) and _is_named(single.path, told):
            return folder
        known.append(folder.name + _how(told))
    raise ValueError(
        f"{single.path} is {single.title}, and of no model whose configs come with Ballast"
        f"{': these are ' + ', '.join(known) if known else ''}. Give base as well: the diffusers folder of that model."
    )


def usual_encoder(title: str, name: str, cls: str, parts: Mapping[str, Any]) -> str:
    """Return the kind of a published encoder, or else its class, and what its file is usually called if that is known.

    `parts` are those of the model itself, where its base comes with the pack; else of the first one of that `title`.
    """
    known = [read_model_index(folder) for folder in sorted((FACTS / "models").iterdir())] if name not in parts else []
    of = [parts, *(index["_parts"] for index in known if index["_file"]["title"] == title)]
    part, usual = next((each[name] for each in of if name in each), ("", ""))
    kind = next((said for start, said in _ENCODERS.items() if part.startswith(start)), cls)
    return f"{kind}, such as {usual.removesuffix('.safetensors')}" if usual else kind


def _is_named(path: Path, told: Mapping[str, Any]) -> bool:
    has, has_not = (re.search(told.get(key, ""), path.stem, re.IGNORECASE) for key in ("named", "not_named"))
    return bool(has) and not (has_not and "not_named" in told)


def _how(told: Mapping[str, Any]) -> str:
    """Return how files of models of the same sizes are told apart."""
    how = [f"named {told.get('called', told['named'])}"] if "named" in told else []
    return f" ({', '.join([*how, 'with transformer_2'])})" if told.get("two") else f" ({how[0]})" if how else ""


def comes_with_pack(index: Mapping[str, Any]) -> bool:
    """Return whether an index is one of ours, whose model has a file for every part."""
    return "_parts" in index


def folders_of(
    index: Mapping[str, Any], transformer: Path, tokenizers: Mapping[str, Path], carried: Collection[str]
) -> dict[str, Path]:
    """Where the parts lie that a model's folder of facts does not hold. `tokenizers` are folders by kind.

    Those of a kind that is `carried` lie in the file of an encoder: a folder without files stands for them.
    ValueError, in one line, for one that is nowhere.
    """
    settled = {**index["_parts"], **index.get("_processors", {})}
    found = {name: FACTS / "parts" / part for name, (part, _) in settled.items()}
    for name, (kind, _) in index["_tokenizers"].items():
        if kind in tokenizers:
            found[name] = tokenizers[kind]
        elif kind in carried:
            found[name] = found[name.replace("tokenizer", "text_encoder")]
        else:
            raise ValueError(
                f"{transformer} needs the tokenizer of {KINDS[kind]}, which no file here has. Give base as well: the "
                f"diffusers folder of that model; or tokenizers, a folder with one for {kind!r}."
            )
    return found
