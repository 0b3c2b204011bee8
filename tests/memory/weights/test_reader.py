"""Weights read straight from safetensors: what from_pretrained gives, in the buffers that blocks stream from."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ballast.memory import ManagedModel
from ballast.memory.engine.ring import WeightGroup as Streamable
from ballast.memory.weights import hostbuffer, loading, reader
from ballast.memory.weights.groups import CallOrder, divide
from ballast.memory.weights.reader import FileExtent, batches, read
from ballast.memory.weights.stored import stored_tensors
from ballast.memory.weights.structure import parameter_refs
from ballast.pipelines.files.components import Component, read_components, read_model_index
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from selection import few
from streamed_models import weight_pages
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

Folders = Callable[[str], Path]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Their published names are others than the module's own: they are read by the library.
RENAMED = {("qwenimage", "text_encoder")}


def parts(folder: Path, dtype: torch.dtype | None = None) -> list[Component]:
    found = read_components(folder, read_model_index(folder), dtype).values()
    return [component for component in found if component.is_module]


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_by_the_library(self: Component) -> nn.Module:
        raise AssertionError(f"{self.name} was not read straight from its files")

    monkeypatch.setattr(Component, "_read", read_by_the_library)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    mine, theirs = tensors_of(module), tensors_of(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        found = mine[name]
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(bits(found), bits(tensor)), name
        assert isinstance(found, nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert not found.requires_grad


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# The others are read as their stock pipelines read them in `test_families`, too.
@pytest.mark.parametrize(
    "name",
    few(tiny.FAMILIES, "hidream", "wan"),
)
def test_every_family_is_read_as_from_pretrained_reads_it(
    name: str, tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        (dtype, component.name): component._read()
        for dtype in (None, *DTYPES.values())
        for component in parts(tiny_folders(name), dtype)
        if (name, component.name) not in RENAMED
    }
    forbid(monkeypatch)
    for (dtype, part), module in expected.items():
        unit = next(c for c in parts(tiny_folders(name), dtype) if c.name == part).unit("")
        in_files = sum(unit.file_bytes().values())
        assert unit.load() == in_files > 0
        assert_same(unit.module, module)
        assert not any(tensor.is_inference() for tensor in tensors_of(unit.module).values())
        assert_lies_in_pieces(unit.module)


def assert_lies_in_pieces(module: nn.Module) -> None:
    for weights in divide(module, list(parameter_refs(module)), CallOrder()).groups:
        group = Streamable.of(weights)
        before = group.tensors()
        group.pack(torch.device("cpu"))
        (host,) = group.hosts
        assert all(old is new for old, new in zip(before, group.tensors(), strict=True)), "packing copied"
        assert host.data_ptr() % 4096 == 0


def test_names_of_their_own_are_left_to_the_library(tiny_folders: Folders) -> None:
    component = next(c for c in parts(tiny_folders("qwenimage")) if c.name == "text_encoder")
    unit = component.unit("")
    unit.load()
    assert_same(unit.module, component._read().requires_grad_(False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_of_another_type(
    dtype: str, tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_folders("flux"), tmp_path / "flux")
    for component in parts(folder, torch.bfloat16):
        module = component._read()
        for path in component.folder.glob("*.safetensors"):
            path.unlink()
        module.save_pretrained(component.folder, max_shard_size="40KB")  # type: ignore[operator]
    again = parts(folder, DTYPES[dtype])
    assert len(again[0].files[0]) > 1
    expected = [component._read() for component in again]
    forbid(monkeypatch)
    for component, module in zip(again, expected, strict=True):
        unit = component.unit("")
        unit.load()
        assert_same(unit.module, module)


def test_load_drop_load(tiny_folders: Folders) -> None:
    for component in parts(tiny_folders("lumina2")):
        unit = component.unit("")
        size, in_files = unit.size_bytes, sum(unit.file_bytes().values())
        unit.load()
        expected = {name: tensor.clone() for name, tensor in tensors_of(unit.module).items()}
        pages = {p.untyped_storage().data_ptr() for p in unit.module.parameters() if p.nbytes}
        assert pages <= set(hostbuffer._pages)
        assert unit.drop() == size == unit.size_bytes
        assert not pages & set(hostbuffer._pages), "the memory went with the weights"
        assert unit.load() == in_files <= size
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(unit.module).items())


# Modules that are not diffusers', written by hand


class Odd(nn.Module):
    """Blocks with buffers, a tied weight, an empty and a scalar parameter."""

    def __init__(self, count: int = 4, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for i, block in enumerate(self.inner):
            block.register_buffer("table", torch.arange(7.0) + i)
            block.register_buffer("step", torch.tensor(i), persistent=False)
            block.none = nn.Parameter(torch.empty(0))
            block.scale = nn.Parameter(torch.tensor(float(i)))
        self.embed = nn.Embedding(50, width)
        self.out = nn.Linear(width, 50, bias=False)
        self.out.weight = self.embed.weight
        self.requires_grad_(False)


def write(module: nn.Module, path: Path, without: tuple[str, ...] = ("out.weight",)) -> None:
    state = {name: tensor.contiguous() for name, tensor in module.state_dict().items() if name not in without}
    save_file(state, path)


def skeleton() -> nn.Module:
    module = Odd()
    meta: dict[int, torch.Tensor] = {}
    for ref in parameter_refs(module):
        if isinstance(ref.tensor, nn.Parameter):
            new = nn.Parameter(ref.tensor.to("meta"), requires_grad=False)
            ref.holder[ref.key] = meta.setdefault(id(ref.tensor), new)
    return module


def odd_unit(path: Path, read: Callable[[], nn.Module] = Odd) -> ManagedModel:
    return ManagedModel("odd", "other", skeleton, read, stored=lambda: stored_tensors([path]))


def never() -> nn.Module:
    raise AssertionError("read by the library")


@pytest.mark.parametrize("without", [("out.weight",), ("embed.weight",)])
def test_tied_weights_buffers_and_odd_shapes(without: tuple[str, ...], tmp_path: Path) -> None:
    write(Odd(), tmp_path / "a.safetensors", without)
    unit = odd_unit(tmp_path / "a.safetensors", never)
    size = unit.size_bytes
    for _ in range(2):
        unit.load()
        assert_same(unit.module, Odd())
        assert unit.module.out.weight is unit.module.embed.weight
        assert_lies_in_pieces(unit.module)
        unit.drop()
        assert unit.size_bytes == size
        assert unit.module.out.weight is unit.module.embed.weight
        assert not set(hostbuffer._pages) & {b.untyped_storage().data_ptr() for b in unit.module.buffers()}


def test_what_does_not_match_is_left_to_the_library(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    state = {k: v for k, v in Odd().state_dict().items() if k != "out.weight"}
    name = "inner.1.weight"
    others: list[dict[str, torch.Tensor]] = [
        {k: v for k, v in state.items() if k != name},
        state | {name: state[name][:5].clone()},
        state | {name: state[name].to(torch.int8)},
        state | {"out.weight": state["embed.weight"] + 1},
    ]
    for content in others:
        save_file(content, path)
        unit = odd_unit(path)
        assert loading.find_stored(unit.module, stored_tensors([path])) is None
        unit.load()
        assert_same(unit.module, Odd())


def test_tied_language_model_whose_head_is_not_in_the_file(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=30, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    component = Component("text_encoder", tmp_path, LlamaForCausalLM)
    assert "lm_head.weight" not in stored_tensors(component.files[0])
    expected = component._read().requires_grad_(False)
    unit = component.unit("")
    unit._read = never
    unit.load()
    assert_same(unit.module, expected)
    assert unit.module.lm_head.weight is unit.module.model.embed_tokens.weight


@pytest.mark.parametrize("behind", [False, True])
def test_tables_that_share_their_rows_are_read_once(
    behind: bool, tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5's `shared` and `encoder.embed_tokens`."""
    unit = next(part for part in parts(tiny_folders("flux")) if part.name == "text_encoder_2").unit("")
    tables = divide(unit.module, list(parameter_refs(unit.module)), unit.calls).tables
    assert [table.path for table in tables] == ["shared", "encoder.embed_tokens"]
    begin, read = reader.Reading.begin, {}

    def seen(reading: reader.Reading) -> None:
        read[id(reading)] = sum(nbytes for nbytes, _ in reading.order)
        begin(reading)

    monkeypatch.setattr(reader.Reading, "begin", seen)
    unit.load(behind=behind)
    unit.await_reading()
    assert sum(read.values()) == sum(parameter.nbytes for parameter in unit.module.parameters())
    assert unit.module.shared.weight is unit.module.encoder.embed_tokens.weight


# Failures


def test_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(Odd(), path)
    stored = stored_tensors([path])
    os.truncate(path, path.stat().st_size // 2)
    unit = ManagedModel("odd", "other", skeleton, never, stored=lambda: stored)
    with pytest.raises(ValueError, match="a.safetensors was changed.*Open the pipeline again") as caught:
        unit.load()
    assert "\n" not in str(caught.value)
    assert_untouched(unit)
    path.unlink()
    with pytest.raises(OSError, match="a.safetensors cannot be read.*No such file") as gone:
        unit.load()
    assert "\n" not in str(gone.value)
    assert_untouched(unit)


def assert_untouched(unit: ManagedModel) -> None:
    assert (unit.tier, unit.host_bytes) == ("disk", 0)
    assert all(parameter.is_meta for parameter in unit.module.parameters())
    assert not any(thread.name.startswith("ballast") for thread in threading.enumerate())


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError(), KeyboardInterrupt()])
def test_error_in_the_middle_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    write(Odd(), path)
    monkeypatch.setattr(reader, "BATCH_BYTES", 512)
    whole, calls = reader._read_exactly, []

    def failing(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            raise error
        whole(*args)

    monkeypatch.setattr(reader, "_read_exactly", failing)
    gc.collect()
    before = set(weight_pages())
    unit = odd_unit(path, never)
    with pytest.raises(type(error)):
        unit.load()
    assert_untouched(unit)
    gc.collect()
    assert set(weight_pages()) == before
    monkeypatch.undo()
    unit.load()
    assert_same(unit.module, Odd())


def test_a_stop_between_two_batches_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    write(Odd(), path)
    monkeypatch.setattr(reader, "BATCH_BYTES", 512)
    whole, batches_read, seen = reader.fill_batch, [], []
    monkeypatch.setattr(reader, "fill_batch", lambda *batch: (batches_read.append(1), time.sleep(0.01), whole(*batch)))

    def stop(read: int) -> None:
        seen.append(read)
        raise KeyboardInterrupt

    gc.collect()
    before = set(weight_pages())
    unit = odd_unit(path, never)
    with pytest.raises(KeyboardInterrupt):
        unit.load(stop)
    assert len(seen) == 1 and 0 < seen[0] <= reader.RAM_THREADS * 512
    assert len(batches_read) <= 2 * reader.RAM_THREADS, "those that were under way"
    assert_untouched(unit)
    gc.collect()
    assert set(weight_pages()) == before
    seen.clear()
    unit.load(seen.append)
    assert seen == sorted(seen) and len(seen) > 2
    assert seen[-1] == sum(parameter.nbytes for parameter in unit.module.parameters())
    assert_same(unit.module, Odd())


@pytest.mark.parametrize(("name", "component"), [("qwenimage", "text_encoder"), ("flux", "text_encoder_2")])
@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), Exception("stop")])
def test_a_stop_while_a_library_reads_leaves_nothing(
    name: str, component: str, error: BaseException, tiny_folders: Folders
) -> None:
    part = next(part for part in parts(tiny_folders(name)) if part.name == component)
    unit = part.unit("")
    unit._stored = None
    looks: list[int] = []
    unit.load(looks.append)
    expected = unit.module
    assert len(looks) > len(list(expected.parameters())), "it is asked more than once a weight"

    unit = part.unit("")
    unit._stored = None
    assert unit.module is not None  # built before, as in a stage
    left = [len(looks) // 2]

    def stop(read: int) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise error

    with pytest.raises(type(error)) as caught:
        unit.load(stop)
    assert caught.value is error, "not what a library made of it"
    assert left == [0], "no more looks while the library clears up"
    assert_untouched(unit)
    unit.load()
    assert_same(unit.module, expected)


def test_header_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(Odd(), path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["inner.0.bias"]["data_offsets"][0] -= 4
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(ValueError, match="damaged header"):
        stored_tensors([path])


# Memory, and the plan


def test_nothing_is_allocated_beside_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    write(Odd(), path)
    made: list[int] = []
    pages_of = hostbuffer.allocate

    def counted(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return pages_of(nbytes)

    monkeypatch.setattr(loading, "allocate", counted)
    unit = odd_unit(path, never)
    assert unit.size_bytes
    with torch.profiler.profile(profile_memory=True) as profile:
        unit.load()
    allocated = sum(event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0)
    assert allocated == 0
    assert sum(made) <= unit.size_bytes + 256 * len(list(parameter_refs(unit.module)))


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 10**6), st.integers(0, 10**5), st.sampled_from([1, 2, 4])),
        max_size=20,
    ),
    st.integers(100, 10**5),
)
def test_batches_hold_every_byte_once_in_the_order_of_the_files(
    given_groups: list[tuple[str, int, int, int]], limit: int
) -> None:
    types = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}
    buffer = torch.empty(0)
    jobs = [
        (FileExtent(Path(path), offset, count, types[size], torch.float32, index * 10**7), buffer)
        for index, (path, offset, count, size) in enumerate(given_groups)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BATCH_BYTES", limit)
        made = batches(jobs)
    flat = [extent for batch in made for extent, _ in batch]
    assert flat == sorted(flat, key=lambda extent: (extent.path, extent.offset))
    assert all(len({extent.path for extent, _ in batch}) == 1 for batch in made)
    assert all(sum(extent.stored_bytes for extent, _ in batch) <= limit for batch in made)
    for extent, _ in jobs:
        mine = sorted((p for p in flat if extent.at <= p.at < extent.at + 10**7), key=lambda p: p.at)
        assert sum(p.count for p in mine) == extent.count
        offset, at = extent.offset, extent.at
        for p in mine:
            assert (p.offset, p.at) == (offset, at)
            offset, at = offset + p.stored_bytes, at + p.count * 4


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_large_casts_go_through_small_pieces(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CAST_BYTES", 1000)
    monkeypatch.setattr(reader, "BATCH_BYTES", 5000)
    values = torch.randn(3333).to(stored)
    path = tmp_path / "a.safetensors"
    save_file({"x": values}, path)
    flat = hostbuffer.allocate(values.numel() * wanted.itemsize)
    at = stored_tensors([path])["x"]
    read([(reader.extent_of(at, wanted, 0), flat)])
    assert torch.equal(flat.view(wanted), load_file(path)["x"].to(wanted))
