"""A model's weights as they are held encoded, in RAM: what a file of them would have come to."""

from __future__ import annotations

import torch
from torch import nn

from ..memory.codecs.converters import CONVERTERS
from ..memory.weights.conversion import planned_codecs
from ..memory.weights.encoding import EncodedWeight, encoding_of, mark_encoded, part_spans, split


def encode(module: nn.Module, weights: str) -> None:
    """Encode the weights of a module on the CPU that a converter, such as "exact12", makes smaller, for good."""
    converter = CONVERTERS[weights]
    for name in planned_codecs(module, converter):
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
