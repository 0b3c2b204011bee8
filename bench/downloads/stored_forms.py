"""The forms that people download weights in, written over a folder in bfloat16: fp8, and GGUF in 4 bits.

    store(folder, "Q4")

The files stay sparse: whole headers, and zeros that the file system need not store.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from ...memory.weights.stored import find_weights, read_header

FORMS = ("bf16", "fp8", "Q4")
_LARGE_BYTES = 10**9  # of an encoder in bfloat16, from which on people take it in fp8
_ALIGNMENT = 32  # bytes, of tensors in GGUF
# GGUF's number of a type, weights of a block, and bytes of it: Q4_K, then Q8_0 and BF16 for rows that it does not fit.
_BLOCKS = ((12, 256, 144), (8, 32, 34), (30, 1, 2))
_PLAIN = _BLOCKS[-1]


def store(folder: Path, form: str) -> None:
    """Store the matrices of a folder in one of FORMS: of transformers in that form, of large encoders in fp8."""
    if form == "bf16":
        return
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        if part.name.startswith(("transformer", "diffusion_transformer")):
            (_to_gguf if form == "Q4" else _to_fp8)(part)
        elif part.name.startswith("text_encoder") and _weights_bytes(part) >= _LARGE_BYTES:
            _to_fp8(part)


def download_bytes(folder: Path) -> int:
    """Return the bytes of a model's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _weights_bytes(part: Path) -> int:
    return sum(path.stat().st_size for path in part.glob("*.safetensors"))


def _shapes(part: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a part's weights by name, and delete its files."""
    files, _ = find_weights(part)
    found = {name: tuple(entry["shape"]) for file in files for name, entry in read_header(file).items()}
    for file in part.glob("*.safetensors*"):
        file.unlink()
    return found


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether files in fewer bits round a weight. They leave embeddings and norms alone."""
    return len(shape) == 2 and name.endswith(".weight") and not ("norm" in name or "embed" in name or "shared" in name)


def _to_fp8(part: Path) -> None:
    stem = "model" if part.name.startswith("text_encoder") else "diffusion_pytorch_model"
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in _shapes(part).items():
        fp8 = _is_matrix(name, shape)
        begin, end = end, end + prod(shape) * (1 if fp8 else 2)
        dtype = "F8_E4M3" if fp8 else "BF16"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    _write(part / f"{stem}.safetensors", [struct.pack("<Q", len(text)), text], end)


def _to_gguf(part: Path) -> None:
    shapes = _shapes(part)
    begin = [b"GGUF", struct.pack("<IQQ", 3, len(shapes), 1), _text("general.architecture"), struct.pack("<I", 8)]
    data, end = _tensors(shapes)
    pieces = [*begin, _text("flux"), *data]
    pieces.append(b"\0" * (-sum(map(len, pieces)) % _ALIGNMENT))
    _write(part / "model.gguf", pieces, end)


def _tensors(shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[bytes], int]:
    """Return what a GGUF file says of each tensor, and the bytes of them all."""
    told, end = [], 0
    for name, shape in shapes.items():
        blocks = _BLOCKS if _is_matrix(name, shape) else (_PLAIN,)
        kind, weights, nbytes = next(block for block in blocks if not shape or shape[-1] % block[1] == 0)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        told.append(_text(name) + sizes + struct.pack("<IQ", kind, end))
        end += -(-prod(shape) // weights * nbytes // _ALIGNMENT) * _ALIGNMENT
    return told, end


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _write(path: Path, pieces: Iterable[bytes], nbytes: int) -> None:
    """Write the head of a file, and `nbytes` of zeros that take no disk."""
    with path.open("wb") as file:
        file.write(b"".join(pieces))
        file.truncate(file.tell() + nbytes)
