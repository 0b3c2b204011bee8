"""Modules with encoded weights, for benchmarks that build theirs in memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from ..memory.codecs.converters import CONVERTERS
from ..memory.weights.conversion import planned_codecs
from ..memory.weights.encoding import EncodedWeight, encoding_of, mark_encoded, part_spans, split


def encode(module: nn.Module, weights: str) -> None:
    """Encode the weights of a module on the CPU that a converter, such as "exact12", makes smaller, for good.

    All cores share the weights, each of which is encoded by one.
    """
    converter = CONVERTERS[weights]

    def one(name: str) -> None:
        path, _, key = name.rpartition(".")
        weight = module.get_parameter(name).detach()
        codec, parts = converter.encode(weight)
        shown = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        module.get_submodule(path)._parameters[key] = shown
        mark_encoded(module, {name: EncodedWeight(codec, ())})
        encoding = encoding_of(shown)
        assert encoding is not None
        encoding.flat = torch.zeros(part_spans(codec)[1], dtype=torch.uint8)
        for view, part in zip(split(codec, encoding.flat), parts, strict=True):
            view.copy_(part.reshape(-1))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, planned_codecs(module, converter)))
