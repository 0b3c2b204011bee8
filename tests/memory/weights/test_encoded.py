"""Encoded weights as files hold them: found by their headers, read as they lie, decoded to the reference's values."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from ballast.memory.weights.encoded import EncodedWeight, encoded_weights, is_encoded
from ballast.memory.weights.hostbuffer import allocate
from ballast.memory.weights.reader import extent_of, read
from comfy_kitchen import tensor as kitchen
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.torch import save_file

BF16 = torch.bfloat16
TYPES = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def loaded(weight: EncodedWeight) -> torch.Tensor:
    """Read into one flat buffer, as a group lies in RAM, and decoded from there."""
    offsets, end = [], 0
    for part in weight.codec.parts:
        offsets.append(end)
        end += -(-part.nbytes // 256) * 256
    buffer = allocate(max(1, end))
    read([(extent_of(at, at.dtype, offset), buffer) for at, offset in zip(weight.parts, offsets, strict=True)])
    parts = [
        buffer[offset : offset + part.nbytes].view(part.dtype)
        for part, offset in zip(weight.codec.parts, offsets, strict=True)
    ]
    out = torch.empty(weight.codec.shape, dtype=weight.codec.dtype)
    weight.codec.decode(parts, out)
    return out


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gguf_is_read_and_decoded_as_the_package_does(tmp_path: Path, dtype: torch.dtype) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "flux")
    plain = {f"{kind.name}.weight": weight(12, 96 + 32 * i).numpy() for i, kind in enumerate(TYPES)}
    for kind, (name, values) in zip(TYPES, plain.items(), strict=True):
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("norm", weight(77).numpy())
    writer.add_tensor("half", weight(3, 5).numpy().astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = encoded_weights(path, dtype)
    for tensor in gguf.GGUFReader(path).tensors:
        ours = loaded(found[tensor.name])
        theirs = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert same_bits(ours, theirs.to(ours.dtype)) and ours.shape == theirs.shape
        assert found[tensor.name].codec.encoded_bytes == tensor.n_bytes
    assert found["Q8_0.weight"].codec.dtype == dtype and found["norm"].codec.dtype == torch.float32
    assert found["half"].codec.dtype == torch.float16


@pytest.mark.parametrize("by_metadata", [False, True])
def test_what_kitchen_writes_is_read_and_decoded(tmp_path: Path, by_metadata: bool) -> None:
    plain, tensors, expected, configs = weight(96, 512), {}, {}, {}
    for layer, layout, config, options in [
        ("fp8", kitchen.TensorCoreFP8Layout, {"format": "float8_e4m3fn"}, {}),
        ("int8", kitchen.TensorWiseINT8Layout, {"format": "int8_tensorwise"}, {}),
        ("rows", kitchen.TensorWiseINT8Layout, {"format": "int8_tensorwise"}, {"per_channel": True}),
        (
            "convrot",
            kitchen.TensorWiseINT8Layout,
            {"format": "int8_tensorwise", "convrot": True},
            {"per_channel": True},
        ),
        ("mxfp8", kitchen.TensorCoreMXFP8Layout, {"format": "mxfp8"}, {}),
        ("nvfp4", kitchen.TensorCoreNVFP4Layout, {"format": "nvfp4"}, {}),
    ]:
        values, params = layout.quantize(plain, convrot=config.get("convrot", False), **options)
        for end, tensor in layout.state_dict_tensors(values, params).items():
            tensors[f"{layer}.weight{end}"] = tensor.view(torch.uint8) if "e8m0" in str(tensor.dtype) else tensor
        expected[layer], configs[layer] = layout.dequantize(values, params), config
    tensors |= {"fp8.bias": weight(96).bfloat16(), "fp8.input_scale": torch.ones(1)}
    if by_metadata:
        metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": configs})}
    else:
        metadata = {"format": "pt"}
        for layer, config in configs.items():
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)
    save_file(tensors, path := tmp_path / "model.safetensors", metadata)
    found = encoded_weights(path, torch.float32)
    assert set(found) == {"fp8.bias", *(f"{layer}.weight" for layer in configs)}
    for layer, theirs in expected.items():
        ours = loaded(found[f"{layer}.weight"])
        if layer == "convrot":  # which Kitchen rounds once more
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(ours, theirs), layer
    assert same_bits(loaded(found["fp8.bias"]), tensors["fp8.bias"])


def test_the_older_fp8_layout_is_read_and_decoded(tmp_path: Path) -> None:
    values = weight(40, 64).mul(1000).to(torch.float8_e4m3fn)
    tensors = {"a.weight": values, "a.scale_weight": torch.tensor([0.013]), "scaled_fp8": values[0, :0].clone()}
    save_file(tensors, path := tmp_path / "t5.safetensors")
    (found,) = encoded_weights(path, BF16).values()
    assert same_bits(loaded(found), (values.float() * 0.013).bfloat16())


def test_plain_files_are_raw(tmp_path: Path) -> None:
    tensors = {"a": weight(5, 7).bfloat16(), "b": torch.arange(9), "c": torch.zeros(()), "d": torch.zeros(0, 3)}
    save_file(tensors, path := tmp_path / "plain.safetensors")
    found = encoded_weights(path, torch.float16)
    assert all(same_bits(loaded(found[name]), tensor) for name, tensor in tensors.items())


def test_a_refusal_names_the_file_and_the_weight_in_one_line(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4, dtype=torch.int8)}, path := tmp_path / "int8.safetensors")
    with pytest.raises(ValueError, match=r"int8\.safetensors: a\.weight: nothing tells how it was quantised .I8."):
        encoded_weights(path, BF16)
    writer = gguf.GGUFWriter(path := tmp_path / "IQ2.gguf", "flux")
    writer.add_tensor("b.weight", np.zeros((2, 66), np.uint8), raw_dtype=Type.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"IQ2\.gguf: b\.weight is stored as IQ2_XXS, which Ballast does not decode"):
        encoded_weights(path, BF16)


def test_a_note_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    save_file({"a.comfy_quant": torch.zeros(5000, dtype=torch.uint8)}, path := tmp_path / "note.safetensors")
    with pytest.raises(ValueError, match=r"note\.safetensors: a\.comfy_quant has 5000 bytes, which no note has"):
        encoded_weights(path, BF16)


@pytest.mark.parametrize("metadata", ['["a"]', '{"format": 3}', '"pt"', "7"])
def test_metadata_that_is_no_text_is_refused(metadata: str, tmp_path: Path) -> None:
    header = f'{{"__metadata__": {metadata}, "a": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}}'.encode()
    (path := tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ValueError, match=r"bad\.safetensors has a damaged header"):
        encoded_weights(path, BF16)


def test_files_that_are_changed_meanwhile_are_noticed(tmp_path: Path) -> None:
    save_file({"a": weight(5, 7)}, path := tmp_path / "plain.safetensors")
    found = encoded_weights(path, BF16)
    save_file({"a": weight(5, 8)}, path)
    with pytest.raises(ValueError, match="was changed since"):
        loaded(found["a"])


def test_only_weights_tell_that_a_file_is_quantised(tmp_path: Path) -> None:
    kinds = {
        "spiece_model": (torch.zeros(5, dtype=torch.uint8), False),
        "layer.weight": (torch.zeros(2, 2, dtype=torch.int8), True),
        "layer.bias": (torch.zeros(2).to(torch.float8_e4m3fn), True),
        "layer.weight_scale": (torch.zeros(2), True),
        "norm": (torch.zeros(2, dtype=BF16), False),
    }
    for name, (tensor, expected) in kinds.items():
        save_file({name: tensor}, path := tmp_path / f"{name}.safetensors")
        assert is_encoded(path) == expected, name
    assert is_encoded(tmp_path / "any.gguf")
