"""Read the running graph: which of our models the next nodes need, in the order in which they will run.

The host hands every node that asks for it the whole prompt. Nodes whose outputs it has cached are in it too and will
not run, which cannot be seen from here: what they are thought to need is a hint that costs at most a worse choice.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from ...memory.vocabulary import Role

if TYPE_CHECKING:
    from ...memory.weights.unit import ManagedModel
    from ...pipelines import StagedPipeline
    from ...pipelines.staged.family import StageName
    from .reference import PipelineReference

Prompt = Mapping[str, Mapping[str, Any]]  # nodes by id, in the host's API format


# References by the graph's entry of the loader that made them. The host keeps them.
_made: weakref.WeakValueDictionary[str, PipelineReference] = weakref.WeakValueDictionary()

_STAGES: dict[str, StageName] = {
    "BallastTextEncode": "encode",
    "BallastSampler": "sample",
    "BallastVAEDecode": "decode",
    "BallastVAEEncode": "decode",  # whose model it is
}
# Of the host's own models, by the type of the link that carries them.
_HOST_ROLES: dict[str, Role] = {
    "CLIP": "text_encoder",
    "CLIP_VISION": "other",
    "CONTROL_NET": "other",
    "GUIDER": "transformer",
    "MODEL": "transformer",
    "VAE": "vae",
}
_ONLY_LOOK = {"BallastVRAMPlan", "BallastFreeVRAM", "BallastVRAMReport"}
_PASS_THROUGH = {"BallastFreeVRAM": "value"}


def remember(node: type[io.ComfyNode], made: PipelineReference) -> None:
    """Record what the running loader has made."""
    if node.hidden.prompt and node.hidden.unique_id in node.hidden.prompt:
        _made[_said(node.hidden.prompt[node.hidden.unique_id])] = made


def runs_stages(node: type[io.ComfyNode]) -> bool:
    """Return whether a node of the graph runs a model of a pipeline; true where there is no graph."""
    prompt = node.hidden.prompt
    return not prompt or any(entry.get("class_type") in _STAGES for entry in prompt.values())


def coming_units(node: type[io.ComfyNode]) -> list[ManagedModel] | None:
    """Return the units of the running node and of those after it, in order; None where there is no graph."""
    prompt, order = node.hidden.prompt, _remaining(node)
    units: list[ManagedModel] = []
    for name in order or ():
        stage = _STAGES.get(prompt[name].get("class_type", ""))
        pipe = _pipeline_of(prompt, name) if stage else None
        units += pipe.units_of(stage) if stage and pipe else []
    return units if order else None


def coming_host_roles(node: type[io.ComfyNode]) -> list[Role] | None:
    """Return the roles of the host's own models that later nodes use, in order; None without a graph.

    A node uses what it takes and does not hand on: one that does both, such as Load LoRA, makes another of it.
    """
    if (order := _remaining(node)) is None:
        return None
    prompt = node.hidden.prompt
    roles: list[Role] = []
    has_control = any("CONTROL_NET" in _taken(prompt, name) for name in prompt)  # which run with the sampler
    for name in order[1:]:
        own = _outputs(prompt[name])
        if prompt[name].get("class_type") not in _ONLY_LOOK:
            taken = [kind for kind in _taken(prompt, name) if kind not in own]
            roles += [_HOST_ROLES[kind] for kind in taken if kind in _HOST_ROLES]
            roles += ["other"] if has_control and "transformer" in roles[-1:] else []
    return roles


def _remaining(node: type[io.ComfyNode]) -> list[str] | None:
    """Return the ids of the running node and of those after it, in order; None where there is no graph."""
    prompt, here = node.hidden.prompt, node.hidden.unique_id
    if not prompt or here not in prompt:
        return None
    order = execution_order(prompt, _is_output)
    return order[order.index(here) :]


def _taken(prompt: Prompt, name: str) -> Iterator[str]:
    """Yield the types of what a node is linked to."""
    for value in prompt[name].get("inputs", {}).values():
        if isinstance(value, list) and len(value) == 2 and value[0] in prompt:
            outputs = _outputs(prompt[value[0]])
            if isinstance(value[1], int) and value[1] < len(outputs):
                yield outputs[value[1]]


def _outputs(entry: Mapping[str, Any]) -> list[str]:
    """Return the types of a node's outputs, as the host knows them."""
    known = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    return list(map(str, getattr(known.get(entry.get("class_type", "")), "RETURN_TYPES", None) or ()))


def execution_order(prompt: Prompt, is_output: Callable[[str], bool]) -> list[str]:
    """Return node ids in the order in which the host runs them when nothing is cached. `is_output` gets class types.

    Of the nodes that could run, it takes an output node first, then one that an output node waits for, then one that
    such a node waits for, then the one that it met first on its way back from the outputs.
    """
    pending = _reached(prompt, [name for name in prompt if is_output(prompt[name].get("class_type", ""))])
    waits_for = {name: {source for source in _sources(prompt, name) if source in pending} for name in pending}
    needed_by = {name: [user for user in pending if name in waits_for[user]] for name in pending}

    def distance(name: str) -> int:
        """Return the steps to the nearest output node, as far as the host looks."""
        near = [name]
        for steps in range(3):
            if any(is_output(prompt[each].get("class_type", "")) for each in near):
                return steps
            near = [user for each in near for user in needed_by[each]]
        return 3

    order: list[str] = []
    while pending:
        ready = [name for name in pending if not waits_for[name] - set(order)]
        if not ready:
            break  # a cycle, which the host refuses
        order.append(min(ready, key=distance))
        pending.remove(order[-1])
    return order


def _reached(prompt: Prompt, outputs: list[str]) -> list[str]:
    """Return the nodes that outputs need, in the order in which the host meets them."""
    found: dict[str, None] = {}
    for output in outputs:
        waiting = [output]
        while waiting:
            if (name := waiting.pop()) not in found:
                found[name] = None
                waiting += _sources(prompt, name)
    return list(found)


def _sources(prompt: Prompt, name: str) -> list[str]:
    links = [value for value in prompt[name].get("inputs", {}).values() if isinstance(value, list) and len(value) == 2]
    return [source for source, _ in links if isinstance(source, str) and source in prompt]


def _is_output(class_type: str) -> bool:
    known = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})  # the host's
    return class_type not in known or bool(getattr(known[class_type], "OUTPUT_NODE", False))


def _pipeline_of(prompt: Prompt, name: str) -> StagedPipeline | None:
    """Return the pipeline that a node is given, if it is open by now."""
    link = prompt[name].get("inputs", {}).get("pipeline")
    while isinstance(link, list) and link and link[0] in prompt:
        source = prompt[link[0]]
        if source.get("class_type") not in _PASS_THROUGH:
            made = _made.get(_said(source))
            return made.opened() if made else None
        link = source.get("inputs", {}).get(_PASS_THROUGH[source["class_type"]])
    return None


def _said(entry: Mapping[str, Any]) -> str:
    return json.dumps([entry.get("class_type"), entry.get("inputs")], sort_keys=True, default=str)
