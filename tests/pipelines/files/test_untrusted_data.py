"""What strangers' files say: headers, configs, latents and cache entries, of absurd sizes and at random."""

from __future__ import annotations

import json
import math
import re
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.bench.rss import peak_rss_bytes
from ballast.memory.weights.stored import read_header, stored_tensors
from ballast.nodes.decode import VaeDecode
from ballast.nodes.sample import Sampler
from ballast.nodes.shared.folders import DEMO, find_pipelines
from ballast.nodes.shared.reference import PipelineReference
from ballast.pipelines.encoding.conditioning import Conditioning
from ballast.pipelines.encoding.embedding_cache import EmbeddingCache
from ballast.pipelines.files.components import read_components, read_model_index
from host import run_node
from newbie_folders import official
from safetensors.torch import save_file
from test_security import WEIGHTS, edit, model, refusal, whole_run

__all__ = ["model"]  # a fixture

# Weights that are none


def header_of(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: list[Any] = [
    {"a": entry(0, 2**53, (2**51,))}, {"a": entry(0, 8, (2**62, 2**62))}, {"a": entry(0, 8, (-1, -2))},
    {"a": entry(8, 0)}, {"a": entry(-8, 0)}, {"a": entry(0, 8.0)}, {"a": entry(0, 8, (2.0,))},
    {"a": entry(), "b": entry()}, {"a": entry(0, 4, (1,)), "b": entry(2, 8, (1,), "F16")}, {"a": entry(4, 8, (1,))},
    {"a": entry(dtype="Q4")}, {"a": entry(dtype=None)}, {"a": entry(dtype=["F32"])}, {"a": entry(shape=2)},
    {"a": entry(shape=[1] * 10_000 + [2])}, {"a": entry(shape=[10**300] * 1000)}, {"a": entry(shape="2")}, {"a": 3},
    {"a": {}}, {"a": []}, {"a": entry() | {"data_offsets": [0]}}, {"a": entry(0, 4, (1,))}, {"a\nb": entry()}, [],
    3, {}, {"a": entry(0, True)}, b'{"a":' * 100_000, b"[" * 1_000_000, b"\xff\xfe{}", b"nope",
    b'{"a": 1' + b"0" * 10_000 + b"}",
    b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), b"{}" + b" " * (17 * 2**20),
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_header_that_no_writer_makes(tmp_path: Path, header: Any) -> None:
    path = header_of(tmp_path / "a.safetensors", header, b"\0" * 8)
    assert str(path) in refusal(lambda: stored_tensors([path]))


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**31, 2**63, 2**64 - 1])
def test_header_of_a_length_that_cannot_be(tmp_path: Path, length: int) -> None:
    path = header_of(tmp_path / "a.safetensors", {"a": entry()}, b"\0" * 8, length)
    assert "not a whole safetensors file" in refusal(lambda: read_header(path))


def test_good_headers_stay_good(tmp_path: Path) -> None:
    tensors = {"b": entry(0, 0, (0, 5)), "a": entry(), "f4": entry(8, 10, (4,), "F4"), "s": entry(10, 12, (), "U16")}
    path = header_of(tmp_path / "a.safetensors", tensors | {"__metadata__": {"a": "b"}}, b"\0" * 12)
    assert set(stored_tensors([path])) == {"a", "b"}


def test_zip_bomb_empty_file_and_folder(model: Path) -> None:
    path = model / "transformer" / WEIGHTS
    path.unlink()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(10_000_000))
    assert "pickle" in refusal(whole_run(model))
    path.write_bytes(b"")
    assert "not a whole safetensors file (0 bytes)" in refusal(whole_run(model))
    path.unlink()
    path.mkdir()
    assert "no weights" in refusal(whole_run(model), FileNotFoundError)
    assert re.search("no file", refusal(lambda: read_header(path), FileNotFoundError))


# Configs


@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json", "scheduler/scheduler_config.json",
                                  "tokenizer/tokenizer_config.json", "tokenizer/tokenizer.json"])  # fmt: skip
@pytest.mark.parametrize(
    "content", ["", "[]", "3", '{"a":' * 100_000, "\0", '{"a": 1' + "0" * 10_000 + "}"], ids=range(6)
)
def test_config_that_is_none(model: Path, name: str, content: str) -> None:
    (model / name).write_text(content)
    assert str((model / name).parent) in refusal(whole_run(model))


@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json", "tokenizer/tokenizer.json"])
def test_config_of_giant_size(model: Path, name: str) -> None:
    with (model / name).open("r+b") as file:
        file.truncate(2**40)  # sparse: it takes no disk, and must not be read
    assert str(2**40) in refusal(whole_run(model))


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("transformer", "hidden_size", 10**12), ("transformer", "num_layers", 10**12),
        ("transformer", "num_layers", 10**5), ("transformer", "axes_lens", [10**12, 48, 48]),
        ("transformer", "axes_lens", [10**9, 48, 48]), ("transformer", "num_attention_heads", 0),
        ("transformer", "hidden_size", -32), ("transformer", "patch_size", "2"),
        ("text_encoder", "hidden_size", 10**12), ("text_encoder", "vocab_size", 10**15),
        ("text_encoder", "num_hidden_layers", 10**9), ("text_encoder", "num_hidden_layers", None),
        ("text_encoder", "hidden_activation", "os.system"), ("text_encoder", "vocab_size", {}),
        ("vae", "block_out_channels", [8] * 100_000), ("vae", "layers_per_block", 10**9),
        ("vae", "latent_channels", 10**12), ("vae", "down_block_types", ["os", "system"]),
        ("vae", "norm_num_groups", 0), ("vae", "act_fn", []),
    ],
)  # fmt: skip
def test_config_of_absurd_sizes(model: Path, part: str, key: str, value: Any) -> None:
    edit(model / part / "config.json", **{key: value})
    before = peak_rss_bytes()
    assert str(model) in refusal(whole_run(model))
    assert peak_rss_bytes() - before < 500e6


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("scheduler", "num_train_timesteps", 10**12), ("scheduler", "num_train_timesteps", 1e12),
        ("scheduler", "num_train_timesteps", -(10**12)), ("scheduler", "num_train_timesteps", 10**4000),
        ("scheduler", "max_image_seq_len", 10**6), ("scheduler", "trained_betas", [0.1, 1e9]),
        ("transformer", "axes_dim_rope", [10**6, 8, 8]), ("transformer", "sample_size", 10**6),
        ("transformer", "max_resolution", [10**12, 8]), ("text_encoder", "rope", {"max_len": 10**9}),
    ],
)  # fmt: skip
def test_numbers_that_no_config_has_are_refused_when_it_is_opened(model: Path, part: str, key: str, value: Any) -> None:
    path = model / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    edit(path, **{key: value})
    message = refusal(lambda: ballast.open_pipeline(model, device="cpu"))
    assert str(path) in message and key in message and len(message) < 400


def test_numbers_without_end_mean_no_limit(model: Path) -> None:
    edit(model / "scheduler" / "scheduler_config.json", lambda_min_clipped=-math.inf)
    edit(model / "text_encoder" / "config.json", rope_theta=10**9)
    ballast.open_pipeline(model, device="cpu")


@pytest.mark.parametrize(("given", "kept"), [(77, 77), (10**12, int(1e30)), (int(1e30), int(1e30))])
def test_tokenizer_that_fills_up_to_the_end_of_memory(model: Path, given: int, kept: int) -> None:
    edit(model / "tokenizer" / "tokenizer_config.json", model_max_length=given)
    components = read_components(model, read_model_index(model), None)
    assert components["tokenizer"].create().model_max_length == kept


# Latents


LATENTS = {
    "not a LATENT": [3, "a", None, torch.zeros(1, 4, 4, 6), [{"samples": torch.zeros(1, 4, 4, 6)}]],
    "no samples": [{}, {"samples": None}, {"sample": torch.zeros(1, 4, 4, 6)}],
    "not a tensor": [{"samples": value} for value in ([[1.0]], "a", 3)],
    "dense": [
        {"samples": torch.zeros(1, 4, 4, 6).to_sparse()},
        {"samples": torch.nested.nested_tensor([torch.zeros(4, 4, 6)])},
        {"samples": torch.zeros(1, 4, 4, 6, device="meta")},
        {"samples": torch.zeros(1, 4, 4, 6, dtype=torch.int64)},
        {"samples": torch.zeros(1, 4, 4, 6, dtype=torch.complex64)},
        {"samples": torch.zeros(1, 4, 4, 0)},
        {"samples": torch.zeros(1).expand(1, 4, 10**7, 10**7)},
    ],
    "NaN or infinite": [{"samples": torch.full((1, 8, 4, 6), float("nan"))}],
    "channels": [{"samples": torch.zeros(shape)} for shape in [(4, 4, 6), (1, 12, 4, 6), (1, 4, 1, 4, 6), ()]],
}


@pytest.fixture(scope="module")
def pipeline() -> PipelineReference:
    return PipelineReference(str(find_pipelines()[DEMO]), "", "auto", None, "cpu", False)


@pytest.mark.parametrize(
    ("word", "number"), [(word, i) for word, latents in LATENTS.items() for i in range(len(latents))]
)
def test_latent_of_a_stranger(pipeline: PipelineReference, word: str, number: int) -> None:
    latent = LATENTS[word][number]
    run = partial(run_node, VaeDecode, pipeline=pipeline, latent=latent)
    # One of another model is kept in a file, and the error is that of a failed decode.
    assert word in refusal(run, TypeError, ValueError, RuntimeError)


def test_latent_of_a_stranger_to_start_from(tmp_path: Path) -> None:
    newbie = PipelineReference(str(official(tmp_path / "newbie")), "", "auto", None, "cpu", False)
    conditioning = newbie.open().encode("a boat")
    for word, latents in LATENTS.items():
        for latent in latents:
            if latent is None:
                continue  # nothing is connected
            run = partial(run_node, Sampler, pipeline=newbie, conditioning=conditioning, steps=1, latent=latent)
            message = refusal(run, TypeError, ValueError)
            assert word in message or word == "channels"  # NewBie says it of some in other words


# Entries of the embedding cache

KEY = "0" * 64
EMBEDS = torch.ones(1, 3, 4)


def entry_of(path: Path, tensors: dict[str, torch.Tensor] | None = None, info: Any = None) -> None:
    words = {"ballast": json.dumps({"prompt": "a"} if info is None else info)}
    save_file(tensors or {"prompt_embeds": EMBEDS}, path, metadata=words)


@pytest.mark.parametrize(
    "tensors",
    [
        {"generator": EMBEDS}, {"../../prompt_embeds": EMBEDS}, {"a/b": EMBEDS}, {"prompt_embeds#x": EMBEDS},
        {"prompt_embeds#1": EMBEDS}, {"prompt_embeds": EMBEDS, "prompt_embeds#0": EMBEDS.clone()}, {"": EMBEDS},
        {"prompt_embeds#0": EMBEDS, "prompt_embeds#2": EMBEDS.clone()}, {"prompt_embeds\n": EMBEDS}, {"self": EMBEDS},
    ],
)  # fmt: skip
def test_cache_entry_with_other_names(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    entry_of(tmp_path / f"{KEY}.safetensors", tensors)
    assert EmbeddingCache(tmp_path).get(KEY) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("info", [[], 3, {"prompt": 3}, {"prompt": {}}, "a"])
def test_cache_entry_with_another_origin(tmp_path: Path, info: Any, caplog: pytest.LogCaptureFixture) -> None:
    entry_of(tmp_path / f"{KEY}.safetensors", info=info)
    assert EmbeddingCache(tmp_path).get(KEY) is None
    assert not list(tmp_path.iterdir())
    assert "dropping a damaged entry" in caplog.text


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_cache_entry_with_a_damaged_header(tmp_path: Path, header: Any) -> None:
    header_of(tmp_path / f"{KEY}.safetensors", header, b"\0" * 8)
    assert EmbeddingCache(tmp_path).get(KEY) is None
    assert not list(tmp_path.iterdir())


def test_cache_entry_that_is_huge_or_a_link(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "cache" / f"{KEY}.safetensors", tmp_path / "elsewhere"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(2**40)
    assert EmbeddingCache(path.parent).get(KEY) is None
    assert not path.exists()
    entry_of(elsewhere)
    before = elsewhere.stat()
    path.symlink_to(elsewhere)
    cache = EmbeddingCache(path.parent)
    assert cache.get(KEY) is None
    path.symlink_to(elsewhere)
    cache.put(KEY, Conditioning({"prompt_embeds": EMBEDS}, {}))
    assert not path.is_symlink()
    assert (elsewhere.stat().st_mtime_ns, elsewhere.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_cache_entry_of_ours_is_taken(tmp_path: Path) -> None:
    kept = Conditioning({"prompt_embeds": [EMBEDS, EMBEDS * 2], "text_mask": EMBEDS.bool()}, {"prompt": "a"})
    EmbeddingCache(tmp_path).put(KEY, kept)
    found = EmbeddingCache(tmp_path).get(KEY)
    assert found is not None
    assert found.info == kept.info
    assert torch.equal(found.tensors["prompt_embeds"][1], EMBEDS * 2)


def test_odd_name_of_a_number_leaves_one_line() -> None:
    from ballast.pipelines.files import trust

    with pytest.raises(ValueError, match=r"has 'a\\nb' = 1000000000, where none has more than 1000") as why:
        trust._check_numbers(Path("config.json"), {"a\nb": 10**9}, 1000, re.compile(""))
    assert "\n" not in str(why.value)
