"""Files whose weights are quantised: streamed as they are stored, split and swapped by rows, never decoded in RAM."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import gguf
import pytest
import tiny
import torch
from ballast.memory.codecs import fp8, int8
from ballast.memory.planning.fit import sizes_of
from ballast.memory.reports.timeline import Event
from ballast.memory.weights import reader
from ballast.memory.weights.encoded import encoded_weights
from ballast.memory.weights.encoding import EncodedWeight
from ballast.pipelines.files.components import read_components, read_model_index
from ballast.pipelines.files.single.given import GivenFiles
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.torch import load_file, save_file
from selection import few
from single_files import base_of, state_of
from single_files.original_names import converted, original

Folders = Callable[[str], Path]
State = dict[str, torch.Tensor]
BF16 = torch.bfloat16


def is_quantised(name: str, value: torch.Tensor) -> bool:
    return name.endswith(".weight") and value.ndim == 2 and value.shape[1] % 32 == 0


def write_gguf(kind: Type, at: Path, weights: State, architecture: str = "flux") -> Path:
    writer = gguf.GGUFWriter(path := at.with_suffix(".gguf"), architecture)
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
    return path


def write_scaled(codec: Any, kind: str, at: Path, weights: State) -> Path:
    found: State = {}
    for name, value in weights.items():
        if not is_quantised(name, value):
            found[name] = value.to(BF16)
            continue
        made, (values, scales) = codec.encode(value.to(BF16))
        layer = name.removesuffix(".weight")
        found |= {name: values.view(made.shape), f"{layer}.weight_scale": scales.view(-1, 1)}
        note = json.dumps({"format": kind}).encode()
        found[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
    save_file(found, at)
    return at


def write_one_scale(at: Path, weights: State) -> Path:
    """fp8 with a scale for a whole weight, as the older `scaled_fp8` has it."""
    found: State = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
    for name, value in weights.items():
        found[name] = value.to(BF16)
        if is_quantised(name, value):
            scale = value.abs().max() / 448
            found[name] = (value / scale).to(torch.float8_e4m3fn)
            found[f"{name.removesuffix('weight')}scale_weight"] = scale
    save_file(found, at)
    return at


def write_cast(at: Path, weights: State) -> Path:
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in weights.items()}, at)
    return at


WRITERS: dict[str, Callable[[Path, State], Path]] = {
    "q8_0": lambda *args: write_gguf(Type.Q8_0, *args),
    "q4_0": lambda *args: write_gguf(Type.Q4_0, *args),
    "int8": lambda *args: write_scaled(int8, "int8_tensorwise", *args),
    "fp8": lambda *args: write_scaled(fp8, "float8_e4m3fn", *args),
    "fp8 of one scale": write_one_scale,
    "fp8 without scales": write_cast,
}


def decoded(weight: EncodedWeight) -> torch.Tensor:
    parts = []
    for at in weight.parts:
        content = at.path.read_bytes()[at.offset : at.offset + at.shape[0] * at.dtype.itemsize]
        parts.append(torch.frombuffer(bytearray(content), dtype=at.dtype))
    out = torch.empty(weight.codec.shape, dtype=weight.codec.dtype)
    weight.codec.decode(parts, out)
    return out.to(BF16)


def pair(name: str, how: str, folder: Path, root: Path) -> tuple[Path, Path, Path]:
    """The original file of a transformer, quantised; a base; and a folder of the weights that it is decoded to."""
    path = WRITERS[how](root / "model.safetensors", original(name, state_of(folder)))
    base, plain = base_of(folder, root / "base"), base_of(folder, root / "plain")
    values = converted(name, {key: decoded(weight) for key, weight in encoded_weights(path, BF16).items()})
    save_file({key: tensor.contiguous() for key, tensor in values.items()}, plain / "transformer" / "model.safetensors")
    (plain / "transformer" / "model.safetensors").rename(plain / "transformer" / "diffusion_pytorch_model.safetensors")
    return path, base, plain


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests of this file share."""
    return tmp_path_factory.mktemp("kept")


@pytest.mark.parametrize(
    "how", few(["q4_0", "int8", "fp8 of one scale", "fp8 without scales"], "q4_0", "fp8 of one scale")
)
def test_a_quantised_file_runs_as_its_plain_weights_do(
    how: str, tiny_folders: Folders, tmp_path: Path, kept: Path, sim: ModuleType
) -> None:
    """Joined projections and the swapped modulation among them: equal bits, and 0 bytes left."""
    path, base, plain = pair("flux", how, tiny_folders("flux"), tmp_path)
    shared = {"dtype": "bf16", "cache_dir": kept}
    _, encode, sample, _ = tiny.stages("flux", plain, "sim", **shared)
    expected = sample(cond := encode(), strategy="resident")
    pipe, _, sample, _ = tiny.stages("flux", path, "sim", base=base, **shared)
    for strategy in ("streamed", "resident"):
        assert torch.equal(sample(cond, strategy=strategy), expected)
        assert sim.stats().allocated_bytes == 0
    unit = pipe.denoisers[0]
    assert unit.size_bytes < 1.2 * path.stat().st_size
    within = pipe.within(ram=90_000)
    assert torch.equal(within.sample(cond, width=48, height=32, steps=2, guidance=4.0, strategy="streamed"), expected)


@pytest.mark.parametrize("how", few(["cast", "q8_0", "fp8"], "cast", "q8_0"))
@pytest.mark.parametrize("share", few([None, 0.5, 0.0], 0.5))
def test_the_bar_counts_bytes_of_files_wherever_they_are_read(
    how: str, share: float | None, tiny_folders: Folders, tmp_path: Path, kept: Path, sim: ModuleType, monkeypatch: Any
) -> None:
    """To RAM, some to RAM and the others through windows, and all through windows; to be cast or decoded."""
    folder, more = tiny_folders("flux"), {}
    if how != "cast":
        path, base, _ = pair("flux", how, folder, tmp_path)
        more = {"base": base}
        weights = sum(int(each.n_bytes) for each in gguf.GGUFReader(path).tensors) if how == "q8_0" else 0
        weights = weights or sum(each.nbytes for key, each in load_file(path).items() if "comfy_quant" not in key)
    else:
        path, weights = folder, tiny.proportions(folder)["transformer"]
    monkeypatch.setattr(reader, "BATCH_BYTES", 16384)
    fill = reader.fill_batch
    monkeypatch.setattr(reader, "fill_batch", lambda *batch: (time.sleep(0.02), fill(*batch))[1])  # so that calls wait
    pipe = ballast.open_pipeline(path, device="sim", dtype="bf16", cache_dir=kept, **more)
    cond = pipe.encode("a boat")
    (unit,), seen = pipe.denoisers, list[Event]()
    unit.drop()
    windows = 3 * max(group.packed_bytes for group in sizes_of(unit).groups)
    ram = None if share is None else windows + int(share * (unit.size_bytes - windows))
    with pipe.manager.timeline.watched(lambda event, of: seen.append(event) if of is unit else None):
        pipe.within(ram=ram).sample(cond, width=48, height=32, steps=2, guidance=4.0)
    told = [(event.bytes, event.total_bytes) for event in seen if event.kind == "reading"]
    total = told[-1][1]
    assert total == weights
    begun = [event.bytes for event in seen if event.kind == "read"]
    assert (begun == [total]) if ram is None else (len(begun) <= (share == 0.5) and all(n < total for n in begun))
    bytes_told = [nbytes for nbytes, of in told if of == total]
    assert bytes_told == sorted(bytes_told) and bytes_told[-1] == total, told
    assert len(set(bytes_told)) > 3, told
    first_call = [event.kind for event in seen].index("ran")
    assert [event.kind for event in seen[first_call + 1 :]].count("reading") <= 1, "the steps tell the rest"


@pytest.mark.parametrize("name", ["sd3", "lumina2", "hunyuan_video", "chroma", "sana", "flux2_klein", "zimage"])
@pytest.mark.parametrize("how", ["q8_0", "fp8", "fp8 of one scale"])
def test_rows_of_quantised_weights_are_those_of_the_plain(
    name: str, how: str, tiny_folders: Folders, tmp_path: Path
) -> None:
    """Each parameter of each family decodes to the rows that diffusers' converter makes of the decoded file."""
    path, base, plain = pair(name, how, tiny_folders(name), tmp_path)
    index = {"transformer": read_model_index(base)["transformer"]}
    found = read_components(base, index, None, None, GivenFiles(path).components(index))["transformer"]
    assert found.run_dtype == BF16
    expected = state_of(plain)
    count = 0
    for key, source in found.stored.items():
        if isinstance(source, EncodedWeight):
            count += 1
            assert torch.equal(_read(source).view(expected[key].shape), expected[key]), key
    assert count


def _read(source: EncodedWeight) -> torch.Tensor:
    content, parts = source.path.read_bytes(), []
    for at in source.parts:
        size = at.dtype.itemsize
        runs = at.runs or ((at.offset, at.shape[0]),)
        raw = b"".join(content[offset : offset + count * size] for offset, count in runs)
        parts.append(torch.frombuffer(bytearray(raw), dtype=at.dtype))
    out = torch.empty(source.codec.shape, dtype=source.codec.dtype)
    source.codec.decode(parts, out)
    return out


def test_text_encoders_and_vaes_that_are_quantised(tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    """T5 in fp8 with scales, streamed as it is stored."""
    folder = tiny_folders("flux")
    base = base_of(folder, tmp_path / "base", "text_encoder_2")
    save_file(original("flux", state_of(folder)), path := tmp_path / "flux.safetensors")
    t5 = write_one_scale(tmp_path / "t5.safetensors", state_of(folder, "text_encoder_2"))
    pipe = ballast.open_pipeline(path, device="sim", base=base, text_encoders=[t5])
    encoder = next(unit for unit in pipe.encoders if unit.name == "text_encoder_2")
    cond = pipe.encode("a red boat", "", max_sequence_length=16)
    assert encoder.size_bytes < 1.2 * t5.stat().st_size
    assert sim.stats().allocated_bytes == 0
    whole = ballast.open_pipeline(folder, device="sim").encode("a red boat", "", max_sequence_length=16)
    near = (cond.tensors["prompt_embeds"].float() - whole.tensors["prompt_embeds"].float()).norm()
    assert near < 0.2 * whole.tensors["prompt_embeds"].float().norm()


def in_gguf(state: State, architecture: gguf.MODEL_ARCH, prefix: str) -> State:
    """By the names that the package `gguf` gives the weights of transformers."""
    names = gguf.get_tensor_name_map(architecture, 99)
    return {str(names.get_name(prefix + name, (".weight", ".bias"))): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("family", "part", "architecture", "prefix"),
    [
        ("flux", "text_encoder_2", gguf.MODEL_ARCH.T5ENCODER, ""),
        ("wan", "text_encoder", gguf.MODEL_ARCH.T5, ""),
        ("zimage", "text_encoder", gguf.MODEL_ARCH.QWEN3, "model."),
        ("hunyuan_video15", "text_encoder", gguf.MODEL_ARCH.QWEN2, "model."),
    ],
)
def test_text_encoders_of_gguf(
    family: str, part: str, architecture: gguf.MODEL_ARCH, prefix: str, tiny_folders: Folders, tmp_path: Path
) -> None:
    """Each parameter is the weight of its name, quantised."""
    folder = tiny_folders(family)
    state = state_of(folder, part)
    named = in_gguf(state, architecture, prefix)
    path = write_gguf(Type.Q8_0, tmp_path / "encoder", named, gguf.MODEL_ARCH_NAMES[architecture])
    base = base_of(folder, tmp_path / "base", part)
    index = {part: read_model_index(base)[part]}
    files = GivenFiles(path, (path,))
    makers = {part: files.components(index)[part]}
    found = read_components(base, index, None, None, makers)[part]
    for key, source in found.stored.items():
        made = _read(source) if isinstance(source, EncodedWeight) else None
        if made is not None:
            torch.testing.assert_close(made.float(), state[key], atol=0.05, rtol=0.05)
    assert state.keys() - {"encoder.embed_tokens.weight"} <= found.stored.keys()


def mixed(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of Llama's queries and keys in the order of llama.cpp's converter."""
    return weight.view(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape).contiguous()


@pytest.mark.parametrize("plain", [False, True])
def test_llama_of_gguf(plain: bool, tiny_folders: Folders, tmp_path: Path) -> None:
    """Its queries and keys in transformers' order, each row of its own blocks; its table of frequencies is not read."""
    part, folder = "text_encoder", tiny_folders("hunyuan_video")
    config = json.loads((folder / part / "config.json").read_text("utf-8"))
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state_of(folder, part).items()}
    named = in_gguf(state, gguf.MODEL_ARCH.LLAMA, "model.") | {"rope_freqs.weight": torch.ones(2)}
    for end, heads in (("attn_q.weight", queries), ("attn_k.weight", keys)):
        for name in [name for name in named if name.endswith(end)]:
            assert not torch.equal(mixed(named[name], heads), named[name])
            named[name] = mixed(named[name], heads)
    path = write_gguf(Type.F32 if plain else Type.Q8_0, tmp_path / "llama", named, "llama")
    base = base_of(folder, tmp_path / "base", part)
    index = {part: read_model_index(base)[part]}
    makers = {part: GivenFiles(path, (path,)).components(index)[part]}
    found = read_components(base, index, torch.float32, None, makers)[part]
    unit = found.unit("")
    unit.load()
    for key, tensor in unit.module.state_dict().items():
        source = found.stored[key]
        value = _read(source) if isinstance(source, EncodedWeight) else tensor
        torch.testing.assert_close(value.float(), state[key], atol=0 if plain else 0.03, rtol=0)
    assert plain != any(isinstance(source, EncodedWeight) for source in found.stored.values())


def test_text_encoders_of_other_gguf_are_refused(tiny_folders: Folders, tmp_path: Path) -> None:
    """Those with llama.cpp's names, whose rows lie as the architecture says."""
    folder = tiny_folders("lumina2")
    named = in_gguf(state_of(folder, "text_encoder"), gguf.MODEL_ARCH.GEMMA2, "model.")
    path = write_gguf(Type.Q8_0, tmp_path / "gemma", named, "gemma")
    save_file(original("lumina2", state_of(folder)), model := tmp_path / "lumina2.safetensors")
    with pytest.raises(ValueError, match="GGUF of 'gemma'"):
        ballast.open_pipeline(model, device="cpu", base=base_of(folder, tmp_path / "base"), text_encoders=[path])
    with pytest.raises(ValueError, match="holds no transformer that is known here"):
        ballast.open_pipeline(path, device="cpu", base=base_of(folder, tmp_path / "base"))
