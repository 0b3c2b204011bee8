"""Which blocks of a modular pipeline encode the prompt, and which come after. Told by the components they ask for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...files.components import Component

VAE = "vae"  # what nearly all blocks call the module that makes pictures of latents


@dataclass(frozen=True)
class BlockStages:
    """The blocks of one workflow in their order: those that encode the prompt, and the others up to the decoder."""

    encode: tuple[Any, ...]
    sample: tuple[Any, ...]

    @property
    def encoders(self) -> set[str]:
        """The components that the encoding blocks ask for."""
        return asked(self.encode)

    @property
    def all(self) -> tuple[Any, ...]:
        """All blocks."""
        return self.encode + self.sample


def stages_of(blocks: Any, given: Collection[str], components: Mapping[str, Component]) -> BlockStages:
    """Return the stages of the workflow that diffusers selects for the `given` inputs.

    Encoding ends with the last block that asks for a text encoder, a tokenizer or a processor of texts, and for no
    VAE: LTX-2's encodes pictures in the dtype of its text encoder.
    """
    defaults = {param.name: param.default for param in blocks.inputs if param.default is not None}
    chosen = blocks.get_execution_blocks(**defaults | dict.fromkeys(given, True))
    leaves = tuple(chosen.sub_blocks.values()) if chosen is not None and chosen.sub_blocks else (chosen,)
    texts = {name for name, component in components.items() if _reads_text(component)}
    last = max((n for n, each in enumerate(leaves) if texts & asked([each]) and VAE not in asked([each])), default=-1)
    return BlockStages(leaves[: last + 1], leaves[last + 1 :])


def decoder_of(blocks: Any, components: Mapping[str, Component]) -> str:
    """Return the name of the component that makes pictures of latents: "vae" where blocks after the loop ask for it.

    Else it is the first of theirs that decodes, such as LTX-2.5's `diffusion_decoder`.
    """
    steps = list(blocks.sub_blocks.values())
    samples = [any(name in components and components[name].role == "transformer" for name in asked([s])) for s in steps]
    last = max((n for n, one in enumerate(samples) if one), default=len(steps))
    found = [
        spec.name for s in steps[last + 1 :] for spec in s.expected_components if hasattr(spec.type_hint, "decode")
    ]
    return found[0] if found and VAE not in found else VAE


def asked(blocks: Collection[Any]) -> set[str]:
    """Return the names of the components that blocks ask for."""
    return {spec.name for block in blocks for spec in block.expected_components}


def inputs_of(blocks: Collection[Any]) -> dict[str, Any]:
    """Return the inputs that blocks take from outside, with their defaults: none that one before them makes."""
    found: dict[str, Any] = {}
    made: set[str] = set()
    for block in blocks:
        for param in block.inputs:
            if param.name and param.name not in made:
                found.setdefault(param.name, param.default)
        made |= {param.name for param in block.intermediate_outputs}
    return found


def outputs_of(blocks: Collection[Any]) -> dict[str, str | None]:
    """Return what blocks add to the state, with the kind of inputs that it counts as."""
    return {param.name: param.kwargs_type for block in blocks for param in block.intermediate_outputs}


def _reads_text(component: Component) -> bool:
    import transformers

    return component.role == "text_encoder" or issubclass(
        component.cls, transformers.PreTrainedTokenizerBase | transformers.ProcessorMixin
    )
