"""Changes of every kind for layers of given shapes, by the names of their trainers, and the weights that they make."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, ...]
Kind = Callable[[str, Shape, torch.Generator], tuple[Tensors, torch.Tensor]]

ALPHA, RANK = 3.0, 4


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def _lora(layer: str, shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    out, into, *kernel = shape
    down = _random(generator, RANK, into, *kernel)
    up = _random(generator, out, RANK, *(1 for _ in kernel))
    named = {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up, f"{layer}.alpha": torch.tensor(ALPHA)}
    return named, ALPHA / RANK * (up.flatten(1) @ down.flatten(1)).reshape(shape)


def _locon(layer: str, shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """With a Tucker core."""
    out, into, *kernel = shape
    ones = [1 for _ in kernel]
    down, up = _random(generator, RANK, into, *ones), _random(generator, out, RANK, *ones)
    mid = _random(generator, RANK, RANK, *kernel)
    named = {f"{layer}.lora_{way}.weight": value for way, value in (("down", down), ("mid", mid), ("up", up))}
    made = torch.einsum("or,rs...,si->oi...", up.flatten(1), mid, down.flatten(1))
    return named | {f"{layer}.alpha": torch.tensor(ALPHA)}, ALPHA / RANK * made


def _loha(layer: str, shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    out, into = shape[0], math.prod(shape[1:])
    halves = [(_random(generator, out, RANK), _random(generator, RANK, into)) for _ in range(2)]
    parts = {f"w{i}_{part}": half["ab".index(part)] for i, half in enumerate(halves, 1) for part in "ab"}
    named = {f"{layer}.hada_{name}": value for name, value in parts.items()}
    made = (halves[0][0] @ halves[0][1]) * (halves[1][0] @ halves[1][1])
    return named | {f"{layer}.alpha": torch.tensor(ALPHA)}, ALPHA / RANK * made.reshape(shape)


def _loha_tucker(layer: str, shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    out, into, *kernel = shape
    named, made = {}, torch.ones(shape)
    for i in (1, 2):
        a, b, core = (_random(generator, RANK, *rest) for rest in ((out,), (into,), (RANK, *kernel)))
        named |= {f"{layer}.hada_w{i}_a": a, f"{layer}.hada_w{i}_b": b, f"{layer}.hada_t{i}": core}
        made = made * torch.einsum("rs...,ro,si->oi...", core, a, b)
    return named | {f"{layer}.alpha": torch.tensor(ALPHA)}, ALPHA / RANK * made


def _factors(size: int) -> tuple[int, int]:
    small = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    return small, size // small


def _lokr(layer: str, shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Of two whole factors, which no alpha scales."""
    (a, c), (b, d), kernel = _factors(shape[0]), _factors(shape[1]), shape[2:]
    w1, w2 = _random(generator, a, b), _random(generator, c, d, *kernel)
    named = {f"{layer}.lokr_w1": w1, f"{layer}.lokr_w2": w2, f"{layer}.alpha": torch.tensor(ALPHA)}
    return named, _kron(w1, w2)


def _lokr_low(layer: str, shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """Of two factors of low rank."""
    (a, c), (b, d), kernel = _factors(shape[0]), _factors(shape[1]), shape[2:]
    parts = {
        "w1_a": _random(generator, a, RANK),
        "w1_b": _random(generator, RANK, b),
        "w2_a": _random(generator, c, RANK),
        "w2_b": _random(generator, RANK, d, *kernel),
    }
    w2 = (parts["w2_a"] @ parts["w2_b"].flatten(1)).reshape(c, d, *kernel)
    named = {f"{layer}.lokr_{name}": value for name, value in parts.items()} | {f"{layer}.alpha": torch.tensor(ALPHA)}
    return named, ALPHA / RANK * _kron(parts["w1_a"] @ parts["w1_b"], w2)


def _lokr_tucker(layer: str, shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    (a, c), (b, d), kernel = _factors(shape[0]), _factors(shape[1]), shape[2:]
    w1, w2_a, w2_b = _random(generator, a, b), _random(generator, RANK, c), _random(generator, RANK, d)
    core = _random(generator, RANK, RANK, *kernel)
    parts = {"w1": w1, "w2_a": w2_a, "w2_b": w2_b, "t2": core}
    named = {f"{layer}.lokr_{name}": value for name, value in parts.items()} | {f"{layer}.alpha": torch.tensor(ALPHA)}
    return named, ALPHA / RANK * _kron(w1, torch.einsum("rs...,rc,sd->cd...", core, w2_a, w2_b))


def _diff(layer: str, shape: Shape, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    made = 0.1 * torch.randn(shape, generator=generator)
    return {f"{layer}.diff": made}, made


def _kron(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    made = torch.einsum("ab,cd...->acbd...", one, other)
    return made.reshape(one.shape[0] * other.shape[0], one.shape[1] * other.shape[1], *other.shape[2:])


KINDS: dict[str, Kind] = {
    "lora": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "lokr, low rank": _lokr_low,
    "diff": _diff,
}
TUCKER: dict[str, Kind] = {
    "locon, tucker": _locon,
    "loha, tucker": _loha_tucker,
    "lokr, tucker": _lokr_tucker,
}
