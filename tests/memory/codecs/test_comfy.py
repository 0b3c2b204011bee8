"""Quantised safetensors, recognised from their headers; what is not known for sure is refused in one line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from ballast.memory.codecs.comfy import METADATA
from ballast.memory.codecs.fp8 import Fp8
from ballast.memory.codecs.header import Recognised
from ballast.memory.codecs.int8 import Int8, RotatedInt8
from ballast.memory.codecs.layouts import recognise
from ballast.memory.codecs.microscaled import Mxfp8, Nvfp4
from ballast.memory.codecs.raw import Raw
from hypothesis import given, settings
from hypothesis import strategies as st

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
Header = dict[str, dict[str, Any]]


def entry(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


def note(**config: Any) -> bytes:
    return json.dumps(config).encode()


def read(header: Header, notes: dict[str, bytes] | None = None, **metadata: Any) -> dict[str, Recognised]:
    texts = {METADATA: json.dumps(metadata)} if metadata else {}
    return recognise(header, texts, notes or {}, BF16)


def refused(header: Header, match: str, notes: dict[str, bytes] | None = None, **metadata: Any) -> None:
    with pytest.raises(ValueError, match=match) as error:
        read(header, notes, **metadata)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def noted(
    weight: dict[str, Any], scale: dict[str, Any] | None, config: dict[str, Any], **more: dict[str, Any]
) -> tuple:
    header = {"a.weight": weight, "a.bias": entry("BF16", 64), "a.comfy_quant": entry("U8", 40)}
    header |= {"a.weight_scale": scale} if scale else {}
    return header | {f"a.{name}": value for name, value in more.items()}, {"a.comfy_quant": note(**config)}


FP8 = {"format": "float8_e4m3fn"}
INT8 = {"format": "int8_tensorwise"}
CONVROT = INT8 | {"convrot": True, "convrot_groupsize": 64}
LAYOUTS = {
    "fp8": (*noted(entry("F8_E4M3", 64, 256), entry("F32"), FP8), Fp8((64, 256), BF16, E4M3, 1)),
    "fp8 by rows": (*noted(entry("F8_E4M3", 64, 256), entry("F32", 64, 1), FP8), Fp8((64, 256), BF16, E4M3, 64)),
    "fp8, scale of bf16": (
        *noted(entry("F8_E4M3", 64, 256), entry("BF16", 1), FP8),
        Fp8((64, 256), BF16, E4M3, 1, BF16),
    ),
    "fp8 e5m2": (
        *noted(entry("F8_E5M2", 64, 256), entry("F32"), {"format": "float8_e5m2"}),
        Fp8((64, 256), BF16, torch.float8_e5m2, 1),
    ),
    "int8": (*noted(entry("I8", 64, 256), entry("F32"), INT8), Int8((64, 256), BF16, torch.int8, 1)),
    "int8 by rows": (*noted(entry("I8", 64, 256), entry("F32", 64, 1), INT8), Int8((64, 256), BF16, torch.int8, 64)),
    "convrot": (
        *noted(entry("I8", 64, 256), entry("F32", 64, 1), CONVROT),
        RotatedInt8((64, 256), BF16, torch.int8, 64, group=64),
    ),
    "convrot, groups not named": (
        *noted(entry("I8", 64, 256), entry("F32", 64, 1), INT8 | {"convrot": True}),
        RotatedInt8((64, 256), BF16, torch.int8, 64, group=256),
    ),
    "convrot, told within": (
        *noted(entry("I8", 64, 256), entry("F32", 64, 1), INT8 | {"params": CONVROT | {"convrot_groupsize": 16}}),
        RotatedInt8((64, 256), BF16, torch.int8, 64, group=16),
    ),
    "mxfp8": (*noted(entry("F8_E4M3", 64, 256), entry("U8", 128, 8), {"format": "mxfp8"}), Mxfp8((64, 256), BF16)),
    "mxfp8, scales of e8m0": (
        *noted(entry("F8_E4M3", 64, 256), entry("F8_E8M0", 128, 8), {"format": "mxfp8"}),
        Mxfp8((64, 256), BF16),
    ),
    "nvfp4": (
        *noted(entry("U8", 64, 128), entry("F8_E4M3", 128, 16), {"format": "nvfp4"}, weight_scale_2=entry("F32")),
        Nvfp4((64, 256), BF16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_recognised_by_its_note(name: str) -> None:
    header, notes, codec = LAYOUTS[name]
    found = read(header, notes)
    sources = ("a.weight", "a.weight_scale", *(["a.weight_scale_2"] if "a.weight_scale_2" in header else []))
    assert found == {
        "a.weight": Recognised(codec, sources),
        "a.bias": Recognised(Raw((64,), BF16, BF16), ("a.bias",)),
    }


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_a_layout_is_recognised_by_the_metadata(name: str, prefix: str) -> None:
    header, notes, codec = LAYOUTS[name]
    config = json.loads(notes["a.comfy_quant"])
    bare = {prefix + name: value for name, value in header.items() if name != "a.comfy_quant"}
    found = read(bare, format_version="1.0", layers={"a": config})
    assert found[f"{prefix}a.weight"].codec == codec and set(found) == {f"{prefix}a.weight", f"{prefix}a.bias"}


@pytest.mark.parametrize("marker", ["scaled_fp8", "model.diffusion_model.scaled_fp8", None])
def test_the_older_layout_is_recognised_by_its_scales(marker: str | None) -> None:
    header = {
        "a.weight": entry("F8_E4M3", 64, 256),
        "a.scale_weight": entry("F32", 1),
        "a.scale_input": entry("F32", 1),
        "b.weight": entry("F8_E4M3", 8),
        "c.weight": entry("F32", 8),
    } | ({marker: entry("F8_E4M3", 2)} if marker else {})
    assert read(header) == {
        "a.weight": Recognised(Fp8((64, 256), BF16, E4M3, 1), ("a.weight", "a.scale_weight")),
        "b.weight": Recognised(Raw((8,), BF16, E4M3), ("b.weight",)),
        "c.weight": Recognised(Raw((8,), F32, F32), ("c.weight",)),
    }


MODEL = "model.diffusion_model."
TEXT = "text_encoders.t5xxl.transformer."
SCALELESS = {"a.weight": entry("F8_E4M3", 64, 256), "a.bias": entry("F8_E4M3", 64)}


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("prefix", ["", MODEL, TEXT])
@pytest.mark.parametrize("mark", ["scaled_fp8", "a note", "the metadata", "another's scale"])
def test_fp8_without_its_scale_is_refused_where_the_model_is_marked(mark: str, prefix: str, kind: str) -> None:
    header = {prefix + "a.weight": entry(kind, 64, 256), prefix + "c.weight": entry("BF16", 4, 4)}
    notes: dict[str, bytes] = {}
    metadata: dict[str, Any] = {}
    other = {prefix + "b.weight": entry("F8_E4M3", 8, 8), prefix + "b.weight_scale": entry("F32", 1)}
    if mark == "scaled_fp8":
        header[prefix + "scaled_fp8"] = entry("F8_E4M3", 2)
    else:
        header |= other
    if mark == "a note":
        header[prefix + "b.comfy_quant"], notes = entry("U8", 40), {prefix + "b.comfy_quant": note(**FP8)}
    if mark == "the metadata":
        metadata = {"layers": {prefix + "b": FP8}}
    name = re.escape(f"{prefix}a.weight")
    refused(header, rf"^{name}: .* marked as scaled, .*{name}_scale is missing\. Download", notes, **metadata)
    own = {prefix + "a.weight_scale": entry("F32", 1)}
    assert read(header | own, notes, **metadata)[prefix + "a.weight"].codec.name == "fp8"


@pytest.mark.parametrize("format", [FP8, INT8])
def test_a_layer_that_is_told_to_be_scaled_lacks_its_scale(format: dict[str, Any]) -> None:
    header = {"a.weight": entry("F8_E4M3" if format is FP8 else "I8", 64, 256), "a.comfy_quant": entry("U8", 40)}
    refused(header, r"^a\.weight: its scale a\.weight_scale is missing\. Download", {"a.comfy_quant": note(**format)})
    del header["a.comfy_quant"]
    refused(header, r"^a\.weight: its scale a\.weight_scale is missing\. Download", layers={"a": format})


def test_fp8_that_was_cast_is_read_as_it_is() -> None:
    """In a file without a mark, and in a model whose neighbour in the file is scaled."""
    wanted = Recognised(Raw((64, 256), BF16, E4M3), ("a.weight",))
    assert read(SCALELESS)["a.weight"] == wanted
    encoder = {TEXT + "b.weight": entry("F8_E4M3", 8, 8), TEXT + "b.scale_weight": entry("F32", 1)}
    beside = encoder | {TEXT + "scaled_fp8": entry("F8_E4M3", 2), MODEL + "a.weight": entry("F8_E4M3", 64, 256)}
    assert read(beside)[MODEL + "a.weight"].codec == wanted.codec
    assert read(SCALELESS | beside)["a.weight"] == wanted


def test_a_plain_file_is_raw_throughout() -> None:
    header = {"a.weight": entry("BF16", 3, 4), "b": entry("I64", 5), "c.mask": entry("BOOL", 2), "d": entry("U8", 9)}
    found = read(header)
    assert {name: weight.codec.encoded_bytes for name, weight in found.items()} == {
        "a.weight": 24, "b": 40, "c.mask": 2, "d": 9,
    }  # fmt: skip
    assert all(
        weight.codec.dtype == weight.codec.stored and weight.sources == (name,) for name, weight in found.items()
    )


def test_scales_that_are_missing_are_refused() -> None:
    header, notes, _ = LAYOUTS["fp8"]
    del (header := dict(header))["a.weight_scale"]
    refused(header, "^a.weight: its scale a.weight_scale is missing. Download", notes)
    header, notes, _ = LAYOUTS["nvfp4"]
    del (header := dict(header))["a.weight_scale_2"]
    refused(header, "^a.weight: its scale a.weight_scale_2 is missing", notes)


def test_weights_that_are_missing_are_refused() -> None:
    header, notes, _ = LAYOUTS["fp8"]
    del (header := dict(header))["a.weight"]
    refused(header, "^a.weight: it is told to be float8_e4m3fn, and is not there", notes)
    refused(header | {"a.comfy_quant": entry("F32")}, "a.weight", layers={"a": FP8})
    refused({"a.weight_scale": entry("F32")}, "^a.weight_scale: nothing tells how a.weight .None. was quantised")
    refused({"b.weight": entry("BF16", 2)}, "^a.weight: .* names it, and it is not there", layers={"a": FP8})


@pytest.mark.parametrize(
    "kind", ["convrot_w4a4", "asym_w4a8_int8", "int8_blockwise", "svdquant_w4a4", "", None, 7, [1]]
)
def test_formats_that_are_not_decoded_are_refused_by_name(kind: Any) -> None:
    header, notes = noted(entry("I8", 64, 256), entry("F32", 64, 1), {"format": kind})
    refused(header, "^a.weight: it is quantised as .*; Ballast decodes float8_e4m3fn, ", notes)
    refused(header | {"a.comfy_quant": entry("U8", 2)}, "^a.weight: it is quantised as None", {"a.comfy_quant": b"{}"})


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_damaged_notes_are_refused(text: bytes) -> None:
    header, _, _ = LAYOUTS["fp8"]
    refused(header, "^a.comfy_quant: it (is not JSON|holds no JSON object)", {"a.comfy_quant": text})
    with pytest.raises(ValueError, match=f"^{METADATA}: it "):
        recognise({"a.weight": entry("BF16", 2)}, {METADATA: text.decode("latin-1")}, {}, BF16)


@pytest.mark.parametrize("layers", [None, 3, ["a"], "a"])
def test_metadata_without_layers_is_refused(layers: Any) -> None:
    refused({"a.weight": entry("BF16", 2)}, f"^{METADATA}: it names no layers", layers=layers)


def test_a_note_that_contradicts_the_metadata_is_refused() -> None:
    header, notes, _ = LAYOUTS["convrot"]
    refused(header, f"^a.comfy_quant: it contradicts {METADATA}", notes, layers={"a": INT8})
    assert read(header, notes, layers={"a": CONVROT}) == read(header, notes)


@pytest.mark.parametrize(
    ("weight", "scale", "config", "match"),
    [
        (entry("BF16", 64, 256), entry("F32"), FP8, "told to be fp8, and stored as BF16"),
        (entry("U8", 64, 256), entry("F32"), INT8, "stored as U8 where that format has I8"),
        (entry("F8_E4M3", 64, 256), entry("U8"), FP8, "its scale is stored as U8"),
        (entry("F8_E4M3", 64, 256), entry("F64"), FP8, "its scale is stored as F64"),
        (entry("F8_E4M3", 64, 256), entry("F32", 2, 2), FP8, r"scale is of shape \[2, 2\]"),
        (entry("F8_E4M3", 64, 64), entry("F32", 1, 64), FP8, r"of shape \[1, 64\], which is not one for each row"),
        (entry("I8", 64, 64), entry("F32", 1, 64), INT8, r"of shape \[1, 64\], which is not one for each row"),
        (entry("F8_E4M3", 64, 256), entry("F32", 0), FP8, "has 0 scales"),
        (entry("I8", 64, 256), entry("F32", 256), INT8, "has 256 scales"),
        (entry("I8", 64, 250), entry("F32"), CONVROT, "cannot be turned in groups of 64"),
        (entry("I8", 64, 256), entry("F32"), CONVROT | {"convrot_groupsize": 128}, "groups of 128"),
        (entry("I8", 64, 256), entry("F32"), CONVROT | {"convrot_groupsize": "64"}, "note is not understood"),
        (entry("I8", 64, 256), entry("F32"), CONVROT | {"convrot": "yes"}, "note is not understood"),
        (entry("F8_E4M3", 64, 250), entry("U8", 128, 8), {"format": "mxfp8"}, "has 16000 bytes where .* 16384"),
        (entry("F8_E4M3", 64, 256), entry("U8", 64, 8), {"format": "mxfp8"}, "has 512 bytes where .* 1024"),
        (entry("F8_E4M3", 64), entry("U8", 64), {"format": "mxfp8"}, "is no matrix"),
        (entry("U8", 64, 128), entry("F8_E4M3", 64, 16), {"format": "nvfp4"}, "has 1024 bytes where .* 2048"),
        (entry("U8", 64, 128), entry("F32", 64, 16), {"format": "nvfp4"}, "stored as F32"),
        (entry("U8"), entry("F8_E4M3"), {"format": "nvfp4"}, "is no matrix"),
    ],
)  # fmt: skip
def test_parts_of_wrong_types_and_sizes_are_refused(weight: Any, scale: Any, config: Any, match: str) -> None:
    header, notes = noted(weight, scale, config, weight_scale_2=entry("F32"))
    refused(header, f"^a.weight: .*{match}", notes)


def test_a_global_scale_of_another_size_is_refused() -> None:
    header, notes, _ = LAYOUTS["nvfp4"]
    refused(header | {"a.weight_scale_2": entry("F32", 2)}, "a.weight_scale_2 has 8 bytes where nvfp4 .* has 4", notes)


@pytest.mark.parametrize("end", ["weight_scale", "scale_weight"])
@pytest.mark.parametrize("kind", ["I8", "U8", "BF16"])
def test_weights_with_a_scale_and_no_word_of_how_are_refused(kind: str, end: str) -> None:
    """They may be turned, or packed: int8 that is decoded wrongly gives a bad picture and no error."""
    refused({"a.weight": entry(kind, 64, 256), f"a.{end}": entry("F32", 64, 1)}, f"nothing tells how a.weight .{kind}.")


@pytest.mark.parametrize("kind", ["I8", "U8", "F4", "F6_E2M3", "F8_E4M3FNUZ", "F8_E8M0", "X"])
def test_weights_of_few_bits_alone_are_refused(kind: str) -> None:
    refused({"a.weight": entry(kind, 64, 256)}, f"^a.weight: nothing tells how it was quantised .{kind}.")


@pytest.mark.parametrize(
    "name",
    ["a.weight_scale_inv", "a.pre_quant_scale", "a.qweight", "a.weight._data"],
)
def test_layouts_of_other_tools_are_refused_by_what_they_write(name: str) -> None:
    header, notes, _ = LAYOUTS["fp8"]
    refused(header | {name: entry("F32", 2)}, f"^{name}: its layer is .*, which Ballast does not decode", notes)


NAMES = [
    f"{layer}.{end}" for layer in "ab" for end in ("weight", "bias", "weight_scale", "weight_scale_2", "comfy_quant")
]
ENTRIES = st.builds(
    lambda dtype, shape: entry(dtype, *shape),
    st.sampled_from(["F32", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I64", "F4", "?"]),
    st.lists(st.sampled_from([0, 1, 2, 64, 128, 256, 2**40]), max_size=3),
)
FORMATS = st.sampled_from(["float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4", "other", None, 5])
CONFIGS = st.dictionaries(
    st.sampled_from(["format", "convrot", "convrot_groupsize", "params"]),
    FORMATS | st.booleans() | st.integers(-1, 300),
)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(NAMES), ENTRIES), st.dictionaries(st.sampled_from("ab"), CONFIGS | st.none()))
def test_any_header_is_understood_or_refused_in_one_line(header: Header, configs: dict[str, Any]) -> None:
    notes = {f"{layer}.comfy_quant": json.dumps(config).encode() for layer, config in configs.items()}
    try:
        found = read(header, notes)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    for weight in found.values():
        assert len(weight.sources) == len(weight.codec.parts) and set(weight.sources) <= header.keys()
