"""Schema, node class and node output."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker

from ..internal import _ComfyNodeInternal, _NodeOutputInternal, first_real_override
from ._base import Input, Output
from ._multi import MatchType


class Hidden(str, Enum):
    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"
    dynprompt = "DYNPROMPT"
    auth_token_comfy_org = "AUTH_TOKEN_COMFY_ORG"
    api_key_comfy_org = "API_KEY_COMFY_ORG"
    comfy_usage_source = "COMFY_USAGE_SOURCE"


class HiddenHolder:
    """Hidden values of one run. A name that the schema did not ask for reads as None."""

    def __init__(self, values: dict[Any, Any] | None = None):
        for member in Hidden:
            setattr(self, member.name, (values or {}).get(member))

    def __getattr__(self, name: str) -> None:
        return None


@dataclass
class NodeInfoV1:
    input: dict | None = None
    input_order: dict[str, list[str]] | None = None
    is_input_list: bool | None = None
    output: list[str] | None = None
    output_is_list: list[bool] | None = None
    output_name: list[str] | None = None
    output_tooltips: list | None = None
    output_matchtypes: list | None = None
    name: str | None = None
    display_name: str | None = None
    description: str | None = None
    python_module: Any = None
    category: str | None = None
    output_node: bool | None = None
    deprecated: bool | None = None
    experimental: bool | None = None
    dev_only: bool | None = None
    api_node: bool | None = None
    price_badge: dict | None = None
    search_aliases: list[str] | None = None
    essentials_category: str | None = None
    has_intermediate_output: bool | None = None


@dataclass
class Schema:
    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    description: str = ""
    search_aliases: list[str] = field(default_factory=list)
    is_input_list: bool = False
    is_output_node: bool = False
    is_deprecated: bool = False
    is_experimental: bool = False
    is_dev_only: bool = False
    is_api_node: bool = False
    price_badge: Any = None
    not_idempotent: bool = False
    enable_expand: bool = False
    accept_all_inputs: bool = False
    essentials_category: str | None = None
    has_intermediate_output: bool = False

    def validate(self) -> None:
        problems = []
        for kind, slots in (("Input", self.inputs), ("Output", self.outputs)):
            counts = Counter(slot.id for slot in slots)
            twice = [name for name, count in counts.items() if count > 1]
            if twice:
                problems.append(f"{kind} ids used more than once in {self.node_id}: {twice}")
        if problems:
            raise ValueError("\n".join(problems))
        for slot in [*self.inputs, *self.outputs]:
            slot.validate()

    def finalize(self) -> None:
        self.inputs = self.inputs or []
        self.outputs = self.outputs or []
        self.hidden = [] if self.hidden is None else self.hidden
        implied: list[Hidden] = []
        if self.is_api_node:
            implied += [Hidden.auth_token_comfy_org, Hidden.api_key_comfy_org, Hidden.comfy_usage_source]
        if self.is_output_node:
            implied += [Hidden.prompt, Hidden.extra_pnginfo]
        self.hidden.extend(name for name in implied if name not in self.hidden)
        for index, output in enumerate(self.outputs):
            if output.id is None:
                output.id = f"_{index}_{output.io_type}_"

    def get_v1_info(self, cls: type) -> NodeInfoV1:
        groups: dict[str, dict] = {"required": {}}
        for slot in self.inputs:
            options = slot.as_dict()
            options.pop("optional", None)
            group = groups.setdefault("optional" if slot.optional else "required", {})
            group[slot.id] = (slot.get_io_type(), options)
        if self.hidden:
            groups["hidden"] = {member.name: (member.value,) for member in self.hidden}
        templates = [slot.template.template_id if isinstance(slot, MatchType.Output) else None for slot in self.outputs]
        return NodeInfoV1(
            input=groups,
            input_order={name: list(group) for name, group in groups.items()},
            is_input_list=self.is_input_list,
            output=[slot.io_type for slot in self.outputs],
            output_is_list=[slot.is_output_list for slot in self.outputs],
            output_name=[slot.display_name or slot.io_type for slot in self.outputs],
            output_tooltips=[slot.tooltip or None for slot in self.outputs],
            output_matchtypes=templates if any(templates) else None,
            name=self.node_id,
            display_name=self.display_name,
            description=self.description,
            python_module=getattr(cls, "RELATIVE_PYTHON_MODULE", "nodes"),
            category=self.category,
            output_node=self.is_output_node,
            deprecated=self.is_deprecated,
            experimental=self.is_experimental,
            dev_only=self.is_dev_only,
            api_node=self.is_api_node,
            search_aliases=self.search_aliases or None,
            essentials_category=self.essentials_category,
            has_intermediate_output=self.has_intermediate_output,
        )


class _SchemaFlag:
    """A class attribute of the old node API, answered from the schema."""

    def __init__(self, read: Callable[[Schema], Any]):
        self.read = read

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.read(owner.SCHEMA or owner.GET_SCHEMA())


class _FunctionName:
    def __get__(self, instance: Any, owner: type) -> str:
        asynchronous = inspect.iscoroutinefunction(owner.execute)
        return "EXECUTE_NORMALIZED_ASYNC" if asynchronous else "EXECUTE_NORMALIZED"


class NodeOutput(_NodeOutputInternal):
    def __init__(self, *args: Any, ui: Any = None, expand: dict | None = None, block_execution: str | None = None):
        self.args = args
        self.ui = ui
        self.expand = expand
        self.block_execution = block_execution

    @property
    def result(self) -> tuple | None:
        return self.args or None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NodeOutput:
        result = data.get("result", ())
        if isinstance(result, ExecutionBlocker):
            return cls(block_execution=result.message)
        return cls(*result, ui=data.get("ui"), expand=data.get("expand"))

    def __getitem__(self, index: int) -> Any:
        return self.args[index]


class ComfyNode(_ComfyNodeInternal):
    RELATIVE_PYTHON_MODULE: str | None = None
    SCHEMA: Schema | None = None
    hidden: Any = None

    CATEGORY = _SchemaFlag(lambda schema: schema.category)
    DESCRIPTION = _SchemaFlag(lambda schema: schema.description)
    DEPRECATED = _SchemaFlag(lambda schema: schema.is_deprecated)
    EXPERIMENTAL = _SchemaFlag(lambda schema: schema.is_experimental)
    FUNCTION = _FunctionName()
    INPUT_IS_LIST = _SchemaFlag(lambda schema: schema.is_input_list)
    NOT_IDEMPOTENT = _SchemaFlag(lambda schema: schema.not_idempotent)
    OUTPUT_NODE = _SchemaFlag(lambda schema: schema.is_output_node)
    OUTPUT_IS_LIST = _SchemaFlag(lambda schema: [slot.is_output_list for slot in schema.outputs])
    RETURN_TYPES = _SchemaFlag(lambda schema: [slot.io_type for slot in schema.outputs])
    RETURN_NAMES = _SchemaFlag(lambda schema: [slot.display_name or slot.io_type for slot in schema.outputs])

    @classmethod
    def define_schema(cls) -> Schema:
        raise NotImplementedError

    @classmethod
    def execute(cls, **kwargs: Any) -> NodeOutput:
        raise NotImplementedError

    @classmethod
    def validate_inputs(cls, **kwargs: Any) -> bool | str:
        raise NotImplementedError

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def check_lazy_status(cls, **kwargs: Any) -> list[str]:
        return [name for name, value in kwargs.items() if value is None]

    def __init__(self) -> None:
        type(self).VALIDATE_CLASS()

    @classmethod
    def GET_BASE_CLASS(cls) -> type:
        return ComfyNode

    @classmethod
    def VALIDATE_CLASS(cls) -> None:
        for name in ("define_schema", "execute"):
            if first_real_override(cls, name) is None:
                raise Exception(f"Node class {cls.__name__} lacks {name}.")

    @classmethod
    def FINALIZE_SCHEMA(cls) -> Schema:
        schema = cls.define_schema()
        schema.finalize()
        return schema

    @classmethod
    def GET_SCHEMA(cls) -> Schema:
        cls.VALIDATE_CLASS()
        schema = cls.FINALIZE_SCHEMA()
        schema.validate()
        cls.SCHEMA = schema
        return schema

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict]:
        return cls.FINALIZE_SCHEMA().get_v1_info(cls).input

    @classmethod
    def GET_NODE_INFO_V1(cls) -> dict[str, Any]:
        return asdict(cls.GET_SCHEMA().get_v1_info(cls))

    @classmethod
    def PREPARE_CLASS_CLONE(cls, v3_data: dict[str, Any] | None) -> type[ComfyNode]:
        hidden = HiddenHolder((v3_data or {}).get("hidden_inputs"))
        return type(f"{cls.__name__}Clone", (cls,), {"hidden": hidden, "__module__": cls.__module__})

    @classmethod
    def _normalized(cls, returned: Any) -> NodeOutput:
        if returned is None:
            returned = NodeOutput()
        elif isinstance(returned, tuple):
            returned = NodeOutput(*returned)
        elif isinstance(returned, dict):
            returned = NodeOutput.from_dict(returned)
        elif isinstance(returned, ExecutionBlocker):
            returned = NodeOutput(block_execution=returned.message)
        elif not isinstance(returned, NodeOutput):
            raise Exception(f"A node cannot return {type(returned)}; return io.NodeOutput")
        if returned.expand is not None and not cls.SCHEMA.enable_expand:
            raise Exception(f"Node {cls.__name__} returned a subgraph without enable_expand in its schema.")
        return returned

    @classmethod
    def EXECUTE_NORMALIZED(cls, *args: Any, **kwargs: Any) -> NodeOutput:
        return cls._normalized(cls.execute(*args, **kwargs))

    @classmethod
    async def EXECUTE_NORMALIZED_ASYNC(cls, *args: Any, **kwargs: Any) -> NodeOutput:
        return cls._normalized(await cls.execute(*args, **kwargs))
