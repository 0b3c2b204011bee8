"""Where the weights of files lie under the names of a module, also of those that are stored in fewer bits.

Renamers place weights by offset and shape, as plain tensors. A quantised file is shown to them as a plain one: each
weight has an address in a file that could be, and what they make of that is found again among the stored parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from ...memory.weights.encoded import encoded_weights, is_encoded
from ...memory.weights.encoding import EncodedWeight, Source
from ...memory.weights.stored import Stored, find_weights, stored_tensors
from .placing import placed
from .rows import Rows, Run

Places = Mapping[str, Stored]
Rename = Callable[[Places], Places]

FILES = (".safetensors", ".gguf")
_AS = torch.bfloat16  # what encoded weights are shown as; any type would do


def weight_files(folder: Path) -> tuple[list[Path], str | None]:
    """Return the weight files of a model's folder and their variant, as `find_weights`; a lone GGUF file counts too."""
    ggufs = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    if ggufs and not list(folder.glob("*.safetensors")):
        if len(ggufs) > 1:
            raise ValueError(f"{folder} has {len(ggufs)} GGUF files. Leave the one that is to be used.")
        return ggufs, None
    return find_weights(folder)


def shown(files: Sequence[Path]) -> dict[str, Stored]:
    """Return the names and shapes of the weights in files that belong together, as plain tensors."""
    if not any(is_encoded(path) for path in files):
        return stored_tensors(list(files))
    return _addressed(encoded_weights(files, _AS))


def sources(files: Sequence[Path], dtype: torch.dtype, rename: Rename) -> dict[str, Source]:
    """Where each weight that `rename` names lies; quantised ones become `dtype`.

    Raises ValueError, in one line, where what it makes of one does not lie apart in the file.
    """
    if not any(is_encoded(path) for path in files):
        return dict(rename(stored_tensors(list(files))))
    weights = encoded_weights(files, dtype)
    plain = _addressed(weights)
    names, begins = list(plain), [at.offset for at in plain.values()]
    found = {}
    for name, at in rename(plain).items():
        own = names[bisect_right(begins, at.offset) - 1]
        found[name] = _found(at, plain[own].offset, own, weights)
    return found


def _addressed(weights: Mapping[str, EncodedWeight]) -> dict[str, Stored]:
    found, address = {}, 0
    for name, weight in weights.items():
        found[name] = Stored(weight.path, address, _AS, weight.shape, weight.stamp)
        address += max(1, weight.codec.count) * _AS.itemsize
    return found


def _found(at: Stored, address: int, name: str, weights: Mapping[str, EncodedWeight]) -> Source:
    """Return the rows of the weight that lie at an address among the plain ones."""
    row = max(1, prod(weights[name].shape[1:]))
    begin, count = (at.offset - address) // _AS.itemsize, prod(at.shape)
    if begin % row or count % row:
        raise ValueError(f"{at.path}: {name}: it is taken apart within a row. Get the plain file.")
    return placed(Rows(at.shape, (Run(name, begin // row, (begin + count) // row),)), weights)
