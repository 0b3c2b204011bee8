"""Headers of GGUF files: what the package `gguf` writes is read as it says, and nothing damaged is believed."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from ballast.memory.weights.gguf_file import read_gguf_arrays, read_gguf_header
from gguf import GGMLQuantizationType as Type
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "flux")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model(writer: gguf.GGUFWriter) -> None:
    generator = np.random.default_rng(0)
    writer.add_uint32("flux.blocks", 19)
    writer.add_int64("flux.below", -5)
    writer.add_float32("flux.guidance", 3.5)
    writer.add_bool("flux.dev", True)
    writer.add_string("general.name", "tiny \N{SNOWMAN}")
    writer.add_string("tokenizer.chat_template", "x" * 100_000)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(5000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    writer.add_array("flux.axes", [16, 56, 56])
    writer.add_array("comfy.gguf.orig_shape.patch.weight", [8, 4, 2, 2, 2])
    for kind in (Type.Q4_0, Type.Q8_0, Type.Q5_1):
        plain = generator.standard_normal((6, 64)).astype(np.float32)
        writer.add_tensor(f"{kind.name}.weight", quants.quantize(plain, kind), raw_dtype=kind)
    blocks = generator.integers(0, 256, (5, 2 * 144), dtype=np.uint8)
    writer.add_tensor("Q4_K.weight", blocks, raw_dtype=Type.Q4_K)
    writer.add_tensor("norm.scale", generator.standard_normal(77).astype(np.float32))
    writer.add_tensor("half.weight", generator.standard_normal((3, 5, 7)).astype(np.float16))
    writer.add_tensor("patch.weight", generator.standard_normal((8, 32)).astype(np.float32))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", model)


def test_arrays_are_read_when_they_are_asked_for(path: Path) -> None:
    named = {"tokenizer.ggml.tokens", "tokenizer.ggml.scores", "flux.axes", "flux.none", "general.name"}
    found = read_gguf_arrays(path, named)
    assert found.keys() == named - {"flux.none", "general.name"}
    assert found["tokenizer.ggml.tokens"] == [f"token {i}" for i in range(5000)]
    assert found["tokenizer.ggml.scores"] == (0.5,) * 5000 and found["flux.axes"] == (16, 56, 56)


def test_tensors_lie_where_the_package_says(path: Path) -> None:
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    content = path.read_bytes()
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.kind.name == tensor.tensor_type.name
        assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert content[ours.offset : ours.offset + ours.nbytes] == tensor.data.tobytes()
        if tensor.name != "patch.weight":
            assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))


def test_the_shape_that_the_converter_noted_is_taken(path: Path) -> None:
    assert read_gguf_header(path).tensors["patch.weight"].shape == (8, 4, 2, 2, 2)


def test_facts_are_read_and_long_ones_passed_over(path: Path) -> None:
    facts = read_gguf_header(path).facts
    assert facts == {
        "general.architecture": "flux",
        "flux.blocks": 19,
        "flux.below": -5,
        "flux.guidance": 3.5,
        "flux.dev": True,
        "general.name": "tiny \N{SNOWMAN}",
        "flux.axes": (16, 56, 56),
        "comfy.gguf.orig_shape.patch.weight": (8, 4, 2, 2, 2),
    }


def test_another_alignment_is_kept(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(128)
        for name in "ab":
            writer.add_tensor(name, np.ones(5, np.float32))

    file = write(tmp_path / "aligned.gguf", fill)
    offsets = [tensor.offset for tensor in read_gguf_header(file).tensors.values()]
    assert [offset % 128 for offset in offsets] == [0, 0] and offsets[1] - offsets[0] == 128
    assert offsets == [int(tensor.data_offset) for tensor in gguf.GGUFReader(file).tensors]


def test_the_header_of_a_large_tokenizer_is_read_soon(tmp_path: Path) -> None:
    """The package takes many seconds for it."""

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_array("tokenizer.ggml.tokens", [f"a word {i}" for i in range(262_144)])
        writer.add_array("tokenizer.ggml.token_type", [1] * 262_144)
        writer.add_tensor("a", np.ones(5, np.float32))

    file = write(tmp_path / "words.gguf", fill)
    start = time.process_time()
    assert list(read_gguf_header(file).tensors) == ["a"]
    assert time.process_time() - start < 5


# Files made by hand: what no writer makes.

KEY = struct.pack("<Q", 1) + b"k"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def info(name: bytes = b"a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def by_hand(*infos: bytes, facts: tuple[bytes, ...] = (), data: int = 4096, **counts: int) -> bytes:
    tensors, keys = counts.get("tensors", len(infos)), counts.get("keys", len(facts))
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(facts) + b"".join(infos) + bytes(data)


DAMAGED = {
    "a count of tensors": (by_hand(tensors=2**60), "claims 1152921504606846976 tensors"),
    "a count of facts": (by_hand(keys=2**63), "claims 0 tensors and 9223372036854775808 facts"),
    "more tensors than there are": (by_hand(info(), tensors=1000, data=50), "it claims|it ends|no text"),
    "a long name": (by_hand(text(b"n" * 2000)), "a name has 2000 bytes"),
    "a name that is as long as the world": (by_hand(struct.pack("<Q", 2**64 - 1)), "a name has 18446744073709551615"),
    "a name of control characters": (by_hand(info(b"a\nb")), "a name is no text"),
    "a name that is no text": (by_hand(info(b"\xff\xfe")), "utf-8"),
    "a name twice": (by_hand(info(), info(offset=128)), "a stands twice"),
    "many dimensions": (by_hand(info(shape=(1,) * 9)), "a has 9 dimensions"),
    "all dimensions": (by_hand(text(b"a") + struct.pack("<I", 2**32 - 1)), "a has 4294967295 dimensions"),
    "a size beyond the file": (by_hand(info(shape=(2000,))), "a ends at byte .* of"),
    "a size beyond any file": (by_hand(info(shape=(2**32, 2**31))), "a is said to be"),
    "sizes whose product wraps around": (by_hand(info(shape=(2**32, 2**32))), "a is said to be"),
    "a place beyond any file": (by_hand(info(offset=2**63)), "a is said to be|ends at"),
    "a place beyond the file": (by_hand(info(offset=8192)), "a ends at byte"),
    "a place that is not aligned": (by_hand(info(offset=33)), "not aligned"),
    "bytes of another": (by_hand(info(), info(b"b", offset=64)), "b lies on the bytes of another tensor"),
    "a type that is not known": (by_hand(info(kind=99)), "a is of type 99, which is not known"),
    "a type that is no more": (by_hand(info(kind=4)), "a is of type 4"),
    "parts of blocks": (by_hand(info(shape=(48, 2), kind=2)), r"a of \(2, 48\) is no whole blocks of Q4_0, 32 weights"),
    "parts of large blocks": (by_hand(info(shape=(32, 8), kind=12)), "no whole blocks of Q4_K, 256"),
    "a kind of fact": (by_hand(facts=(KEY + struct.pack("<I", 13),)), "a fact is of kind 13"),
    "a kind in an array": (by_hand(facts=(KEY + struct.pack("<IIQ", 9, 77, 1),)), "a fact is of kind 77"),
    "a long array": (by_hand(facts=(KEY + struct.pack("<IIQ", 9, 4, 2**62),)), "it claims .* bytes of header"),
    "a long array of texts": (by_hand(facts=(KEY + struct.pack("<IIQ", 9, 8, 2**62),)), "a fact has"),
    "many texts": (by_hand(facts=(KEY + struct.pack("<IIQ", 9, 8, 10**7),)), "it claims .* bytes of header"),
    "arrays in arrays": (by_hand(facts=(KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50,)), "of kind 9"),
    "a text that ends nowhere": (by_hand(facts=(KEY + struct.pack("<IQ", 8, 2**50),)), "it claims .* bytes of header"),
    "no alignment": (by_hand(facts=(text(b"general.alignment") + struct.pack("<II", 4, 0),)), "alignment is 0"),
    "an odd alignment": (by_hand(facts=(text(b"general.alignment") + struct.pack("<II", 4, 48),)), "alignment is 48"),
    "an alignment in words": (
        by_hand(facts=(text(b"general.alignment") + struct.pack("<I", 8) + text(b"32"),)),
        "alignment is '32'",
    ),
    "a shape of another size": (
        by_hand(info(), facts=(text(b"comfy.gguf.orig_shape.a") + struct.pack("<IIQii", 9, 5, 2, 4, 4),)),
        r"a of \(32,\) is noted to have been \(4, 4\)",
    ),
    "a shape below zero": (
        by_hand(info(), facts=(text(b"comfy.gguf.orig_shape.a") + struct.pack("<IIQii", 9, 5, 2, -4, -8),)),
        "is noted to have been",
    ),
}


def refused(path: Path, match: str) -> None:
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ValueError, match=match) as error:
        read_gguf_header(path)
    assert time.process_time() - start < 10
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20, "nothing is allocated for what a file claims"
    tracemalloc.stop()
    said = str(error.value)
    assert "\n" not in said and len(said) < 600 and said.startswith(str(path)) and said.endswith(("again.", "file."))


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, match = DAMAGED[name]
    (file := tmp_path / "damaged.gguf").write_bytes(content)
    refused(file, match)


def test_what_is_made_by_hand_is_good_but_for_its_damage(tmp_path: Path) -> None:
    (file := tmp_path / "good.gguf").write_bytes(by_hand(info(), info(b"b", (32, 2), 2, 128)))
    tensors = read_gguf_header(file).tensors
    assert [(tensor.shape, tensor.nbytes) for tensor in tensors.values()] == [((32,), 128), ((2, 32), 36)]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is no GGUF file"),
        (b"GGUF", "is no GGUF file"),
        (b"GGML" + bytes(100), "is no GGUF file"),
        (b"version https://git-lfs", "is a pointer of Git LFS"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "is GGUF of version 1; Ballast reads 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "is GGUF of version 50331648"),
        (b"GGUF" + struct.pack("<I", 3), "it claims .* bytes of header in a file of 8"),
    ],
)
def test_other_files_are_refused_in_one_line(content: bytes, match: str, tmp_path: Path) -> None:
    (file := tmp_path / "other.gguf").write_bytes(content)
    refused(file, match)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.gguf"):
        read_gguf_header(tmp_path / "none.gguf")


def test_a_file_that_is_cut_short_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    begin = min(tensor.offset for tensor in read_gguf_header(path).tensors.values())
    file = tmp_path / "cut.gguf"
    for length in [*range(0, 200, 7), *range(200, begin, 9973), begin, len(content) // 2, len(content) - 1000]:
        file.write_bytes(content[:length])
        refused(file, "no GGUF file|bytes of header|it ends|ends at byte")


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_header_with_any_bytes_changed_is_read_or_refused(seed: int, changes: int) -> None:
    """What is read of it lies within the file."""
    import tempfile

    source = random.Random(seed)
    infos = [info(bytes([97 + i]), (64, 4), kind, 1024 * i) for i, kind in enumerate((0, 2, 8, 12, 1))]
    infos[3] = info(b"d", (256, 2), 12, 3072)
    facts = tuple(text(f"key{i}".encode()) + struct.pack("<II", 4, i) for i in range(4))
    content = bytearray(by_hand(*infos, facts=facts, data=8192))
    for _ in range(changes):
        content[source.randrange(8, len(content) - 8192)] = source.choice(
            [0, 1, 2, 127, 128, 255, source.randrange(256)]
        )
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "fuzzed.gguf").write_bytes(content)
        try:
            header = read_gguf_header(file)
        except ValueError as error:
            assert "\n" not in str(error) and str(error).startswith(str(file))
            return
    for tensor in header.tensors.values():
        assert tensor.offset >= 0 and tensor.offset + tensor.nbytes <= len(content)
