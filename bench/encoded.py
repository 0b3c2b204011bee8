"""A model's weights as they are held encoded, in RAM: what a file of them would have come to."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from ..memory.codecs.making import MAKERS
from ..memory.weights.encoding import encoding_of, mark_made, part_spans, split


def encode(module: nn.Module, weights: str) -> None:
    """Encode the weights of a module on the CPU that a maker's name, such as "exact12", is worth it for, for good.

    All cores share the weights, each of which is encoded by one.
    """
    maker, plain = MAKERS[weights], {}
    mark_made(module, maker)
    for owner in module.modules():
        weight = owner._parameters.get("weight")
        if weight is not None and encoding_of(weight):
            plain[owner] = weight.detach()
            owner._parameters["weight"] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    mark_made(module, maker)

    def one(owner: nn.Module) -> None:
        encoding = encoding_of(owner._parameters["weight"])  # type: ignore[arg-type]
        assert encoding is not None
        encoding.codec, parts = maker.encode(plain.pop(owner))
        encoding.flat, encoding.maker = torch.zeros(part_spans(encoding.codec)[1], dtype=torch.uint8), None
        for view, part in zip(split(encoding.codec, encoding.flat), parts, strict=True):
            view.copy_(part.reshape(-1))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, list(plain)))
