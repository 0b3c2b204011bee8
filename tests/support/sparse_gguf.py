"""GGUF files of any size that take no disk."""

from __future__ import annotations

from math import prod
from pathlib import Path

import gguf
import numpy as np
from ballast.memory.weights.stored import find_weights, read_header
from gguf import GGMLQuantizationType as Type


def quantized(folder: Path, kind: Type) -> Path:
    """Put a transformer's files into one sparse GGUF file, its matrices of a kind. Return that."""
    shapes = {}
    for file in find_weights(folder)[0]:
        shapes |= {name: tuple(entry["shape"]) for name, entry in read_header(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    writer = gguf.GGUFWriter(path := folder / "model.gguf", "flux")
    for name, shape in shapes.items():
        fits = len(shape) == 2 and shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        stored = kind if fits else Type.BF16
        weights, nbytes = gguf.GGML_QUANT_SIZES[stored]
        rows = (*shape[:-1], shape[-1] // weights * nbytes)
        writer.add_tensor_info(name, rows, np.dtype(np.uint8), prod(rows), raw_dtype=stored)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    sizes = [-(-info.nbytes // 32) * 32 for tensors in writer.tensors for info in tensors.values()]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + sum(sizes) + 32)
    return path
