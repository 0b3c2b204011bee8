"""Fused kernels give the bits of the eager decoders: run by Triton's interpreter, and built for cards as they are."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from ballast.memory.codecs import exact12, fused
from ballast.memory.codecs.codec import Codec
from ballast.memory.codecs.cost import cost_of
from ballast.memory.codecs.four_bit import FourBit
from ballast.memory.codecs.fp8 import Fp8
from ballast.memory.codecs.gguf import TYPES, codec_of
from ballast.memory.codecs.int8 import Int8, RotatedInt8
from ballast.memory.codecs.microscaled import Mxfp8, Nvfp4
from ballast.memory.codecs.raw import Raw
from ballast.memory.codecs.torchao import ShiftedInt8
from ballast.memory.engine.event_timer import EventTimer
from ballast.memory.engine.streams import Queues

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAME = f"{fused.__package__}.kernels"
KINDS = [kind for kind in TYPES.values() if kind.decode]
LARGE = [  # of several programs, which are interpreted slowly
    Fp8((2050,), BF16, torch.float8_e5m2, 1),
    Mxfp8((260, 1100), BF16),
    Nvfp4((260, 1100), BF16),
]
ODD: list[Codec] = [  # in sizes that are no multiples of what a program decodes
    *(codec_of(kind, (7, 3 * kind.weights), BF16) for kind in KINDS),
    *(codec_of(kind, (3, 1280), BF16) for kind in KINDS),
    Int8((5, 1031), BF16, torch.int8, 5),
    Int8((5, 7), BF16, torch.int8, 1, BF16),
    Int8((3, 2, 3, 3), BF16, torch.int8, 3, F16),
    Fp8((5, 1031), BF16, torch.float8_e4m3fn, 5),
    Mxfp8((131, 70), BF16),
    Nvfp4((131, 70), BF16),
    *LARGE,
    FourBit((3, 1031), BF16, 64),
    FourBit((17, 1031), BF16, 32, 0.3),
]
EAGER = [
    Raw((4, 4), BF16, BF16),
    RotatedInt8((4, 256), BF16, torch.int8, 4),
    ShiftedInt8((4, 256), BF16, torch.int8, 4),
    codec_of(TYPES[1], (4, 4), BF16),
]


def told(codec: Codec) -> str:
    return f"{getattr(codec, 'kind', codec.name)} {'x'.join(map(str, codec.shape))}"


def random_parts(codec: Codec) -> list[torch.Tensor]:
    """Any bytes: a block's factors may be infinite or no numbers. Scales apart from the values are small."""
    generator = torch.Generator().manual_seed(0)

    def one(dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        if dtype in (BF16, F16, F32):
            return (torch.randn(nbytes // dtype.itemsize, generator=generator) * 0.02).to(dtype)
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)

    return [one(part.dtype, part.nbytes) for part in codec.parts]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) & (one.signbit() == other.signbit()) | one.isnan() & other.isnan()).all())


@contextlib.contextmanager
def imported(monkeypatch: pytest.MonkeyPatch, interpret: bool) -> Iterator[ModuleType]:
    """The kernels, which Triton interprets or builds as it was asked when they were imported."""
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpret)))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    try:
        yield importlib.import_module(NAME)
    finally:
        sys.modules.pop(NAME, None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported(monkeypatch, interpret=True) as kernels:
        yield kernels


def launched(codec: Codec, parts: list[torch.Tensor]) -> torch.Tensor:
    out = torch.full((codec.count,), 7, dtype=codec.dtype)
    fused.launch(codec, parts, out)
    return out


# The interpreter rounds to bfloat16 by cutting off, so bits are compared in the other types; `test_gpu` does on a card.
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        pytest.param(
            codec, dtype, marks=pytest.mark.soak if codec in LARGE and dtype == F16 else (), id=f"{told(codec)}-{dtype}"
        )
        for codec in ODD
        for dtype in (F16, F32)
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fused_is_eager_bit_for_bit(codec: Codec, dtype: torch.dtype, interpreted: ModuleType) -> None:
    codec = replace(codec, dtype=dtype)
    parts, expected = random_parts(codec), torch.empty(codec.count, dtype=dtype)
    codec.decode(parts, expected)
    found = launched(codec, parts)
    assert same_bits(found, expected)
    assert found.isfinite().any(), "else nothing is compared"


def test_every_pattern_of_bf16_comes_back(interpreted: ModuleType) -> None:
    """Each among weights of the common exponents, so that most patterns are outliers; the number is odd."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    common = torch.randn(2**21 + 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    codec, parts = exact12.encode(torch.cat([patterns, common]))
    assert codec.name == "exact12" and codec.apart > 2**15
    found = launched(codec, list(parts))
    assert torch.equal(found[: 2**16].view(torch.int16), patterns.view(torch.int16))
    assert torch.equal(found[2**16 :], common)


@pytest.mark.parametrize("codec", EAGER, ids=told)
def test_other_codecs_have_no_kernel(codec: Codec) -> None:
    assert not fused.has_kernel(codec)
    assert cost_of(codec, fused=True) == cost_of(codec)


@pytest.mark.parametrize("codec", ODD, ids=told)
def test_a_fused_decoding_costs_one_kernel(codec: Codec) -> None:
    assert cost_of(codec, fused=True).kernels == ((codec.encoded_bytes + codec.decoded_bytes, 1),)


class _NoCard:
    """Triton's driver of a card that is not there: kernels are built for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@pytest.mark.parametrize("capability", [80, pytest.param(120, marks=pytest.mark.long)])
def test_kernels_can_be_built_and_round_each_operation(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """No multiplication and addition become one, no small number becomes 0, and the result is rounded to nearest."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver = importlib.import_module("triton.runtime.driver").driver
    built: dict[str, str] = {}

    class Built:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def build(*args: Any, **options: Any) -> None:
                built[f"{self.kernel.__name__} {len(built)}"] = self.kernel.warmup(*args, grid=grid, **options).asm[
                    "ptx"
                ]

            return build

    samples = [*ODD[len(KINDS) :], exact12.planned((100, 100), BF16)]
    with imported(monkeypatch, interpret=False) as kernels:
        for name in ("gguf", "scaled", "microscaled", "four_bit", "exact12", "put"):
            monkeypatch.setattr(kernels, name, Built(getattr(kernels, name)))
        monkeypatch.setattr(driver, "_active", _NoCard(capability))
        for codec in samples:
            fused.launch(codec, random_parts(codec), torch.empty(codec.count, dtype=BF16))
    assert len(built) == len(samples) + 1
    for name, code in built.items():
        assert not any(word in code for word in ("fma.", ".ftz")), name
        assert name.startswith(("exact12", "put")) or "cvt.rn.bf16" in code, name


def test_a_kernel_that_gives_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codec = codec_of(TYPES[2], (4, 64), F16)
    calls = []

    def wrong(codec: Codec, parts: Any, out: torch.Tensor) -> None:
        calls.append(codec.shape)
        codec.decode(parts, out)
        out[-1] += 1

    monkeypatch.setattr(fused, "has_kernels", lambda _: True)
    monkeypatch.setattr(fused, "launch", wrong)
    monkeypatch.setattr(fused, "_proved", {})
    parts, out, expected = random_parts(codec), *(torch.empty(codec.count, dtype=F16) for _ in range(2))
    with caplog.at_level(logging.INFO, "ballast"):
        for _ in range(2):
            fused.decode(codec, parts, out)
    codec.decode(parts, expected)
    assert same_bits(out, expected) and calls == [(5, 256)], "proved once, on a sample"
    assert [record.message for record in caplog.records] == [
        "Weights in gguf are decoded step by step on cpu: the fused kernel gives other bits for 1 of 1280 weights."
    ]


def test_a_kernel_that_cannot_be_built_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    codec = Nvfp4((40, 40), BF16)
    monkeypatch.setattr(fused, "has_kernels", lambda _: True)
    monkeypatch.setattr(fused, "launch", fails)
    monkeypatch.setattr(fused, "_proved", {})
    out = torch.empty(codec.count, dtype=BF16)
    with caplog.at_level(logging.INFO, "ballast"):
        fused.decode(codec, random_parts(codec), out)
    assert "the fused kernel cannot be built: Failed to find C compiler." in caplog.text


def test_a_call_in_which_a_kernel_was_built_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Nvfp4((40, 40), BF16)
    monkeypatch.setattr(fused, "has_kernels", lambda _: True)
    monkeypatch.setattr(fused, "launch", lambda codec, parts, out: codec.decode(parts, out))
    monkeypatch.setattr(fused, "_proved", {})
    ends = []
    for _ in range(2):
        timer = EventTimer(Queues(torch.device("cpu")))
        fused.decode(codec, random_parts(codec), torch.empty(codec.count, dtype=BF16))
        ends.append(timer.end())
    assert ends == [False, True]
