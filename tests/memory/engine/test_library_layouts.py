"""Files as bitsandbytes and torchao write them: decoded as these libraries decode them.

`tests/data/layouts` has one small file of each, and what the library made of it. Where the libraries are installed
they write more, of odd sizes; with UPDATE_LAYOUTS=1 they write the files anew.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.memory.codecs.four_bit import FourBit
from ballast.memory.weights.encoded import encoded_weights, is_encoded
from encoded_folders import decoded
from safetensors.torch import load_file, save_file
from torch import nn

BF16 = torch.bfloat16
DATA = Path(__file__).parents[2] / "data" / "layouts"
ULP = 2**-7  # of bf16

Tensors = dict[str, torch.Tensor]


def weight(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn((rows, columns), generator=torch.Generator().manual_seed(0)) * 0.05).to(BF16)


def by_four_bits(kind: str, nested: bool, plain: torch.Tensor, block: int = 64) -> tuple[Tensors, dict, torch.Tensor]:
    library: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    values, state = library.functional.quantize_4bit(
        plain, quant_type=kind, compress_statistics=nested, blocksize=block
    )
    parts = {f"a.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return {"a.weight": values, **parts}, {}, library.functional.dequantize_4bit(values, state)


def by_llm_int8(plain: torch.Tensor) -> tuple[Tensors, dict, torch.Tensor]:
    library: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    values, scales, _ = library.functional.int8_vectorwise_quant(plain.half())
    order = torch.tensor(0, dtype=torch.uint8)
    made = library.functional.int8_vectorwise_dequant(values, scales)
    return {"a.weight": values, "a.SCB": scales, "a.weight_format": order}, {}, made


def by_torchao(config: str, plain: torch.Tensor, **options: Any) -> tuple[Tensors, dict, torch.Tensor]:
    library: Any = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    layer = nn.Linear(*reversed(plain.shape), bias=False, dtype=BF16)
    layer.weight = nn.Parameter(plain, requires_grad=False)
    library.quantize_(module := nn.ModuleDict({"a": layer}), getattr(library, config)(**options))
    tensors, metadata = flatten_tensor_state_dict(module.state_dict())
    return tensors, metadata, module["a"].weight.dequantize()


WRITERS: dict[str, Callable[[torch.Tensor], tuple[Tensors, dict, torch.Tensor]]] = {
    "nf4": lambda plain: by_four_bits("nf4", False, plain),
    "nf4_double": lambda plain: by_four_bits("nf4", True, plain),
    "fp4_double": lambda plain: by_four_bits("fp4", True, plain, block=128),
    "llm_int8": by_llm_int8,
    "torchao_int8": lambda plain: by_torchao("Int8WeightOnlyConfig", plain),
    "torchao_fp8": lambda plain: by_torchao("Float8WeightOnlyConfig", plain),
}
each_layout = pytest.mark.parametrize("name", WRITERS)


def write(path: Path, tensors: Tensors, metadata: dict) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=metadata or None)
    return path


def same(path: Path, expected: torch.Tensor) -> None:
    assert is_encoded(path)
    found = encoded_weights(path, BF16)
    assert set(found) == {"a.weight"}
    assert found["a.weight"].codec.encoded_bytes < 1.2 * expected.numel() + 1200
    torch.testing.assert_close(decoded(found["a.weight"]), expected.to(BF16), rtol=ULP, atol=0)


@pytest.mark.skipif(not os.environ.get("UPDATE_LAYOUTS"), reason="writes tests/data/layouts with UPDATE_LAYOUTS=1")
@each_layout
def test_files_are_written_anew(name: str) -> None:
    tensors, metadata, expected = WRITERS[name](weight(70, 128))
    write(DATA / f"{name}.safetensors", tensors, metadata)
    save_file({"a.weight": expected.to(BF16).contiguous()}, DATA / f"{name}_decoded.safetensors")


@each_layout
def test_a_file_is_decoded_as_its_library_does(name: str) -> None:
    same(DATA / f"{name}.safetensors", load_file(DATA / f"{name}_decoded.safetensors")["a.weight"])


# bitsandbytes 0.50 decodes rows that are no whole blocks wrongly on the CPU: `test_blocks_run_on_over_rows` has those.
@pytest.mark.parametrize("shape", [(1, 128), (3, 256), (129, 384), (1031, 1280)])
@each_layout
def test_any_size_is_decoded_as_the_library_does(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    tensors, metadata, expected = WRITERS[name](weight(*shape))
    same(write(tmp_path / "a.safetensors", tensors, metadata), expected)


@pytest.mark.parametrize("shape", [(7, 50), (5, 5), (1, 1), (33, 96)])
def test_blocks_run_on_over_rows(shape: tuple[int, int]) -> None:
    """The closed form, weight by weight, for sizes that are no whole blocks, and odd ones."""
    codec = FourBit(shape, torch.float32, 32)
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (codec.parts[0].count,), generator=random, dtype=torch.uint8)
    scales, values = torch.rand(codec.blocks, generator=random), torch.randn(16, generator=random)
    out = torch.empty(shape)
    codec.decode((codes, scales, values), out)
    for at, made in enumerate(out.view(-1).tolist()):
        code = int(codes[at // 2]) >> (0 if at % 2 else 4) & 15
        assert made == float(values[code] * scales[at // 32])


@pytest.mark.parametrize("offset", [None, 0.04])
@pytest.mark.parametrize("block", [64, 128])
def test_rows_of_four_bits_are_those_of_the_whole(block: int, offset: float | None) -> None:
    """A fused weight is cut where blocks begin, and where blocks of scales do."""
    codec = FourBit((96, 1024), BF16, block, offset)
    random = torch.Generator().manual_seed(3)
    parts = tuple(
        torch.randint(0, 256, (part.count,), generator=random, dtype=torch.uint8)
        if part.dtype == torch.uint8
        else torch.randn(part.count, generator=random)
        for part in codec.parts
    )
    whole = torch.empty(codec.shape, dtype=BF16)
    codec.decode(parts, whole)
    for begin, end in ((0, 32), (32, 64), (64, 96), (32, 33)):
        some, slices = codec.taken(begin, end)
        out = torch.empty(some.shape, dtype=BF16)
        some.decode([part[at] for part, at in zip(parts, slices, strict=True)], out)
        assert torch.equal(out, whole[begin:end])
    if offset is not None:
        with pytest.raises(ValueError, match="no rows 1 to 2 that lie apart"):
            codec.taken(1, 2)


def test_parts_may_lie_in_different_files(tmp_path: Path) -> None:
    """Where a model was cut into files, a weight's scales may be in the next."""
    tensors = load_file(DATA / "nf4_double.safetensors")
    names = sorted(tensors)
    paths = [
        write(tmp_path / f"{at}.safetensors", {name: tensors[name] for name in some}, {})
        for at, some in enumerate((names[:1], names[1:3], names[3:]))
    ]
    expected = load_file(DATA / "nf4_double_decoded.safetensors")["a.weight"]
    assert torch.equal(decoded(encoded_weights(paths, BF16)["a.weight"]), expected)


def test_what_is_missing_or_damaged_is_refused_in_one_line(tmp_path: Path) -> None:
    numbers = itertools.count()

    def refused(tensors: Tensors, metadata: dict[str, str], match: str) -> None:
        # A file of its own: one written again at once may have the size and the time of the last, by which it is known.
        path = write(tmp_path / f"bad-{next(numbers)}.safetensors", tensors, metadata)
        with pytest.raises(ValueError, match=match) as error:
            encoded_weights(path, BF16)
        assert "\n" not in str(error.value) and str(path) in str(error.value)

    nf4, state = load_file(DATA / "nf4_double.safetensors"), "a.weight.quant_state.bitsandbytes__nf4"
    for name in ("a.weight", "a.weight.quant_map", "a.weight.nested_quant_map"):
        refused({key: value for key, value in nf4.items() if key != name}, {}, f"its part {name} is missing")
    refused({key: value for key, value in nf4.items() if key != state}, {}, "nothing tells how its 4 bits were made")
    refused(nf4 | {"a.weight": nf4["a.weight"][:-1].contiguous()}, {}, "has 4479 bytes where 4 bit of .* has 4480")
    for note, match in (
        (b"{", "not JSON"),
        (b"{}", "tells no shape"),
        (b'{"shape": [70, 128], "blocksize": 64}', "not in blocks of 256 with an offset"),
        (b'{"shape": [70, 128], "blocksize": 63, "nested_blocksize": 256, "nested_offset": 0.1}', "blocks of 63"),
        (b'{"shape": [70, 128], "nested_blocksize": 256, "nested_offset": 0.1}', "no size of blocks"),
    ):
        refused(nf4 | {state: torch.frombuffer(bytearray(note), dtype=torch.uint8)}, {}, match)
    int8 = load_file(DATA / "llm_int8.safetensors")
    refused(int8 | {"a.weight_format": torch.tensor(1, dtype=torch.uint8)}, {}, "in the order of a card")
    refused(int8 | {"a.SCB": int8["a.SCB"][:3].contiguous()}, {}, "has 12 bytes where int8 of bitsandbytes")
    ours, told = load_file(DATA / "torchao_int8.safetensors"), '{"_type": "%s", "_data": {"block_size": %s}}'
    refused(ours, {}, "header does not tell how it was quantised")
    refused(ours, {"a.weight": told % ("Int4Tensor", "[1, 128]")}, "quantised as 'Int4Tensor' of torchao")
    refused(ours, {"a.weight": told % ("Int8Tensor", "[1, 32]")}, r"of blocks of \[1, 32\], not of rows")
    across = ours | {"a._weight_scale": ours["a._weight_scale"].view(1, -1)}
    refused(across, {"a.weight": told % ("Int8Tensor", "[1, 128]")}, "which is not one for each row")
    refused(ours, {"a.weight": told % ("Float8Tensor", "[1, 128]")}, "stored as I8 where that format has F8_E4M3")
    del ours["a._weight_zero_point"]
    refused(ours, {"a.weight": told % ("Int8Tensor", "[1, 128]")}, "its part a._weight_zero_point is missing")


def test_folders_that_the_libraries_saved(tiny_folders: Callable[[str], Path], tmp_path: Path, sim: ModuleType) -> None:
    """A transformer by torchao and an encoder by bitsandbytes, each saved by its own class, as plain weights run."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from diffusers import FluxTransformer2DModel, TorchAoConfig
    from transformers import BitsAndBytesConfig, T5EncoderModel

    folder = tiny_folders("flux")
    ours, plain = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("ours", "plain"))
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    models = {
        "transformer": FluxTransformer2DModel.from_pretrained(
            folder / "transformer",
            quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig()),
            torch_dtype=BF16,
        ),
        "text_encoder_2": T5EncoderModel.from_pretrained(
            folder / "text_encoder_2", quantization_config=four, dtype=BF16
        ),
    }
    for part, model in models.items():
        shutil.rmtree(ours / part)
        model.save_pretrained(ours / part)
        (file,) = (ours / part).glob("*.safetensors")
        values = {name: decoded(weight) for name, weight in encoded_weights(file, BF16).items()}
        (file,) = (plain / part).glob("*.safetensors")
        save_file(values, file, metadata={"format": "pt"})
    made = []
    for each in (ours, plain):
        pipe: Any = ballast.open_pipeline(each, device="sim", dtype="bf16")
        made.append(pipe.sample(pipe.encode("a boat"), width=64, height=64, steps=2, strategy="streamed"))
    assert torch.equal(*made) and sim.stats().allocated_bytes == 0
