"""Folders of pipelines whose weights are encoded, with the plain weights of the same values beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import gguf
import torch
from ballast.memory.codecs import fp8, int8
from ballast.memory.weights.encoded import encoded_weights
from ballast.memory.weights.encoding import EncodedWeight
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.torch import load_file, save_file

BF16 = torch.bfloat16


def is_quantised(name: str, value: torch.Tensor) -> bool:
    return name.endswith(".weight") and value.ndim == 2 and value.shape[1] % 32 == 0


def write_gguf(kind: Type, file: Path, weights: dict[str, torch.Tensor]) -> Path:
    writer = gguf.GGUFWriter(path := file.with_name("model.gguf"), "flux")
    for name, value in weights.items():
        values = value.float().numpy()
        if is_quantised(name, value):
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            if value.ndim > 4:  # as city96's converter writes them
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(values.shape))
                values = values.reshape(values.shape[0], -1)
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.unlink()
    return path


def write_scaled(codec: Any, kind: str, file: Path, weights: dict[str, torch.Tensor]) -> Path:
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if not is_quantised(name, value):
            found[name] = value
            continue
        made, (values, scales) = codec.encode(value.to(BF16))
        layer = name.removesuffix(".weight")
        found |= {name: values.view(made.shape), f"{layer}.weight_scale": scales.view(-1, 1)}
        note = json.dumps({"format": kind}).encode()
        found[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
    save_file(found, file, metadata={"format": "pt"})
    return file


def write_four_bits(file: Path, weights: dict[str, torch.Tensor]) -> Path:
    """As bitsandbytes does, in blocks of 64 with a scale each, but with 16 values of equal distance."""
    found, values = {}, torch.linspace(-1, 1, 16)
    for name, value in weights.items():
        if not is_quantised(name, value):
            found[name] = value
            continue
        flat = torch.nn.functional.pad(value.float().flatten(), (0, -value.numel() % 64)).view(-1, 64)
        scales = flat.abs().amax(1)
        codes = ((flat / scales[:, None] + 1) * 7.5).round().nan_to_num(0).to(torch.uint8).flatten()
        codes = codes[: value.numel()].view(-1, 2)
        note = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(value.shape)})
        found |= {name: codes[:, :1] << 4 | codes[:, 1:], f"{name}.absmax": scales, f"{name}.quant_map": values.clone()}
        note_bytes = torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)
        found[f"{name}.quant_state.bitsandbytes__nf4"] = note_bytes
    save_file(found, file, metadata={"format": "pt"})
    config = json.loads(file.with_name("config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file.with_name("config.json").write_text(json.dumps(config))
    return file


def write_cast(file: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Floats of 8 bits without scales."""
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in weights.items()}, file)
    return file


WRITERS: dict[str, Callable[[Path, dict[str, torch.Tensor]], Path]] = {
    "q8_0": lambda *args: write_gguf(Type.Q8_0, *args),
    "q4_0": lambda *args: write_gguf(Type.Q4_0, *args),
    "int8": lambda *args: write_scaled(int8, "int8_tensorwise", *args),
    "fp8": lambda *args: write_scaled(fp8, "float8_e4m3fn", *args),
    "fp8 without scales": write_cast,
    "4 bit": write_four_bits,
}


def decoded(weight: EncodedWeight) -> torch.Tensor:
    parts = []
    for at in weight.parts:
        with at.path.open("rb") as file:
            file.seek(at.offset)
            count = at.shape[0]
            parts.append(torch.frombuffer(bytearray(file.read(count * at.dtype.itemsize)), dtype=at.dtype))
    out = torch.empty(weight.codec.shape, dtype=weight.codec.dtype)
    weight.codec.decode(parts, out)
    return out


class Pair:
    """A folder whose weights are encoded, and one of the plain weights that they are decoded to, in float32."""

    def __init__(self, folder: Path, parts: list[str], how: str, root: Path) -> None:
        self.encoded = Path(shutil.copytree(folder, root / "encoded"))
        self.plain = Path(shutil.copytree(folder, root / "plain"))
        for part in parts:
            (file,) = (self.encoded / part).glob("*.safetensors")
            made = WRITERS[how](file, load_file(file))
            values = {name: decoded(weight) for name, weight in encoded_weights(made, torch.float32).items()}
            (file,) = (self.plain / part).glob("*.safetensors")
            save_file(values, file, metadata={"format": "pt"})

    def open(self, encoded: bool = True, device: str = "sim", **more: Any) -> Any:
        return ballast.open_pipeline(self.encoded if encoded else self.plain, device=device, dtype="bf16", **more)
