"""Weights with float8 among their parts, on a device that knows no such type, as MPS: the CPU's bits."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from ballast.bench.models import encode
from ballast.memory.codecs.codec import Codec, widened
from ballast.memory.codecs.fp8 import Fp8
from ballast.memory.codecs.microscaled import Mxfp8, Nvfp4
from ballast.memory.codecs.raw import Raw
from streamed_models import Blocks, budget, noise, put, run

E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
FLOAT8 = (E4M3, E5M2)

CODECS: dict[str, Codec] = {
    "e4m3, one scale": Fp8((300, 515), BF16, E4M3, 1),
    "e4m3, scales of rows": Fp8((300, 515), F32, E4M3, 300),
    "e5m2": Fp8((7, 64), torch.float16, E5M2, 1, BF16),
    "e4m3 without scales": Raw((30, 5, 7), BF16, E4M3),
    "e5m2 without scales": Raw((33,), F32, E5M2),
    "mxfp8": Mxfp8((300, 515), BF16),
    "nvfp4": Nvfp4((150, 200), F32),
}


@pytest.fixture
def card(sim: ModuleType) -> ModuleType:
    """The simulated card without float8."""
    sim.enable(unknown_types=FLOAT8)
    return sim


def parts_of(codec: Codec) -> list[torch.Tensor]:
    """Finite values: bytes of all kinds, and scales around 1."""
    generator, made = torch.Generator().manual_seed(1), []
    for part in codec.parts:
        if part.name == "scale" and part.dtype.is_floating_point:
            made.append((torch.rand(part.count, generator=generator) + 0.5).to(part.dtype))
            continue
        low, high = (110, 140) if part.name == "scale" else (0, 256)
        values = torch.randint(low, high, (part.nbytes,), generator=generator).to(torch.uint8)
        values[(values & 127) >= (124 if part.dtype == E5M2 else 127)] = 1  # not a number, or infinite
        made.append(values.view(part.dtype))
    return made


def there(part: torch.Tensor) -> torch.Tensor:
    return part.view(torch.uint8).to("sim").view(part.dtype)


@pytest.mark.parametrize("name", CODECS)
def test_decoded_as_on_the_cpu(name: str, card: ModuleType) -> None:
    codec = CODECS[name]
    parts, expected = parts_of(codec), torch.empty(codec.shape, dtype=codec.dtype)
    found = torch.empty(codec.shape, dtype=codec.dtype, device="sim")
    codec.decode(parts, expected)
    codec.decode([there(part) for part in parts], found)
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_byte_has_its_value(dtype: torch.dtype, card: ModuleType) -> None:
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).view(16, 16)
    found, expected = widened(there(values.reshape(-1)).view(16, 16)).cpu(), values.float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())


def test_the_card_refuses_all_but_views(card: ModuleType) -> None:
    values = there(torch.ones(8).to(E4M3))
    assert values.view(2, 4)[1].view(torch.uint8).tolist() == [56] * 4
    for refused in (lambda: values.float(), lambda: values.clone(), lambda: values.cpu(), lambda: values.fill_(1)):
        with pytest.raises(TypeError, match="Undefined type torch.float8_e4m3fn"):
            refused()
    with pytest.raises(TypeError, match="Undefined type"):
        torch.ones(2, device="sim").to(E4M3)
    card.enable()
    assert values.float().tolist() == [1] * 8


@pytest.mark.parametrize("share", [0.0, 2.0], ids=["streamed", "resident"])
def test_models_run(share: float, card: ModuleType) -> None:
    results = []
    for types in ((), FLOAT8):
        card.enable(unknown_types=types)
        module = Blocks()
        encode(module, "fp8")
        placement = put(module, budget(module, share))
        results.append(run(module, noise(64)).cpu())
        placement.remove()
    assert torch.equal(*results)
