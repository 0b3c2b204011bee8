"""Run one node class without a server, on the host's own modules or on the stand-ins in stubs/."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from places import STUBS

CONVERTERS = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}


class InputError(ValueError):
    """An input that the host refuses before it runs the node."""


def use_modules(host: Path | None, base: str | os.PathLike | None = None) -> None:
    """Make `comfy_api`, `folder_paths` and the rest importable: the host's own, or the stand-ins for None.

    Call it before anything imports them. `base` is the folder for models, input and output.
    """
    if host is None:
        sys.path.insert(0, str(STUBS))
        if base is not None:
            import folder_paths

            folder_paths.set_base(base)
        return
    sys.path.insert(0, str(host))
    from comfy.cli_args import args

    args.cpu = True
    args.base_directory = None if base is None else str(base)


def native_models() -> ModuleType:
    """Tiny models of the host's classes. Imported late: there may be no host."""
    from sim_device_pack import models

    return models


class Page:
    """What nodes sent to the page: (node, text), (event, data), (value, total, preview)."""

    def __init__(self) -> None:
        self.client_id = self.last_node_id = self.last_prompt_id = None
        self.texts: list[tuple[str, str]] = []
        self.told: set[str | None] = set()  # the clients that got texts
        self.events: list[tuple[Any, Any]] = []
        self.progress: list[tuple[float, float, Any]] = []

    def send_progress_text(self, text: str | bytes, node_id: str, sid: str | None = None) -> None:
        self.texts.append((str(node_id), text if isinstance(text, str) else bytes(text).decode()))
        self.told.add(sid)

    def send_sync(self, event: Any, data: Any, sid: str | None = None) -> None:
        self.events.append((event, data))


@contextmanager
def page() -> Iterator[Page]:
    """Records what a browser would get. The host throttles progress: only first and last value are sure."""
    import comfy.model_management
    import comfy.utils
    import server

    recorded = Page()

    def hook(value: float, total: float, preview: Any, **kwargs: Any) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        recorded.progress.append((value, total, preview))

    server_before = vars(server.PromptServer).get("instance")
    hook_before = comfy.utils.PROGRESS_BAR_HOOK
    server.PromptServer.instance = recorded
    comfy.utils.set_progress_bar_global_hook(hook)
    try:
        yield recorded
    finally:
        comfy.utils.set_progress_bar_global_hook(hook_before)
        if server_before is None:
            del server.PromptServer.instance
        else:
            server.PromptServer.instance = server_before


def _checked(name: str, kind: str, options: dict[str, Any], value: Any, limits: bool) -> Any:
    if kind in CONVERTERS:
        try:
            value = CONVERTERS[kind](value)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}: {value!r} is not {kind}") from error
    if not limits:
        return value
    if "min" in options and value < options["min"]:
        raise InputError(f"{name}: {value} is smaller than {options['min']}")
    if "max" in options and value > options["max"]:
        raise InputError(f"{name}: {value} is bigger than {options['max']}")
    if kind == "COMBO" and value not in options.get("options", []):
        raise InputError(f"{name}: {value!r} is not in {options.get('options')}")
    return value


def _with_defaults(cls: type, inputs: dict[str, Any], required: dict, optional: dict) -> dict[str, Any]:
    unknown = sorted(set(inputs) - set(required) - set(optional))
    if unknown:
        raise InputError(f"{cls.__name__} has no input {unknown}; it has {[*required, *optional]}")
    values = dict(inputs)
    for name, (kind, options) in required.items():
        if name in values:
            continue
        choices = options.get("options") or [None]
        default = options.get("default", choices[0])
        if default is None or not (kind in CONVERTERS or kind == "COMBO"):
            raise InputError(f"{cls.__name__} needs the input {name!r}")
        values[name] = default
    return values


def run_node(
    cls: type, *, node_id: str = "1", prompt_id: str = "prompt", hidden: dict[str, Any] | None = None, **inputs: Any
) -> Any:
    """Run a node class as the host does: on a locked clone, in inference mode, inside an event loop.

    Required widgets that are left out get their default, optional inputs stay left out. `hidden` gives
    prompt, extra_pnginfo and the like by name; the node sees those that its schema asks for. Returns the
    NodeOutput.
    """
    import torch
    from comfy_api.internal import first_real_override, make_locked_method_func
    from comfy_execution.utils import CurrentNodeContext

    schema = cls.GET_SCHEMA()
    groups = cls.INPUT_TYPES()
    required, optional = groups.get("required", {}), groups.get("optional", {})
    values = _with_defaults(cls, inputs, required, optional)
    given = {"unique_id": node_id, "prompt": {}, "extra_pnginfo": {}} | (hidden or {})
    v3_data = {"hidden_inputs": {member: given.get(member.name) for member in schema.hidden}}

    async def call(method_name: str, arguments: dict[str, Any]) -> Any:
        method = make_locked_method_func(cls, method_name, cls.PREPARE_CLASS_CLONE(v3_data))
        with CurrentNodeContext(prompt_id, node_id, 0):
            answer = method(**arguments)
            return await answer if inspect.isawaitable(answer) else answer

    validate = first_real_override(cls, "validate_inputs")
    names = set()
    if validate is not None:
        spec = inspect.getfullargspec(validate)
        names = set(values) if spec.varkw else set(spec.args) & set(values)
    literals = {}
    for name, (kind, options) in (required | optional).items():
        if name in values:
            values[name] = _checked(name, kind, options, values[name], limits=name not in names)
            literals[name] = values[name] if kind in CONVERTERS or kind == "COMBO" else None
    if names:  # what comes over a link is not known at this point and shows as None
        verdict = asyncio.run(call("validate_inputs", {name: literals[name] for name in names}))
        if verdict is not True:
            raise InputError(f"{cls.__name__}: {verdict}")

    if schema.is_input_list:
        values = {name: [value] for name, value in values.items()}
    with torch.inference_mode():
        output = asyncio.run(call(cls.FUNCTION, values))
    if output.result is not None and len(output.result) != len(schema.outputs):
        raise AssertionError(f"{cls.__name__} returned {len(output.result)} of {len(schema.outputs)} outputs")
    return output
