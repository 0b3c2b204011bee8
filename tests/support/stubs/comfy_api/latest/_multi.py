"""Sockets that take more than one type."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from ._base import AnyType, ComfyTypeIO, Input, Output, WidgetInput


class _MultiInput(Input):
    def __init__(
        self,
        id: str | Input,
        types: list,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        self.input_override = None
        if isinstance(id, Input):
            widget = self.input_override = copy.copy(id)
            optional = widget.optional or optional
            tooltip = tooltip if widget.tooltip is None else widget.tooltip
            display_name = display_name if widget.display_name is None else widget.display_name
            lazy = lazy if widget.lazy is None else widget.lazy
            id = widget.id
            if isinstance(widget, WidgetInput):
                widget.widget_type = widget.get_io_type()
        super().__init__(id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced)
        self._io_types = types

    @property
    def io_types(self) -> list[type]:
        return [kind if isinstance(kind, type) else type(kind) for kind in self._io_types]

    def get_io_type(self) -> str:
        names = [kind.io_type for kind in self.io_types]
        if self.input_override is not None:
            names.insert(0, self.input_override.get_io_type())
        return ",".join(dict.fromkeys(names))

    def as_dict(self) -> dict[str, Any]:
        widget = {} if self.input_override is None else self.input_override.as_dict()
        return widget | super().as_dict()


class MultiType(ComfyTypeIO, io_type="COMFY_MULTITYPED_V3"):
    Input = _MultiInput


class _Template:
    def __init__(self, template_id: str, allowed_types: Any = AnyType):
        kinds = list(allowed_types) if isinstance(allowed_types, Iterable) else [allowed_types]
        for kind in kinds:
            if not (isinstance(kind, ComfyTypeIO) or isinstance(kind, type) and issubclass(kind, ComfyTypeIO)):
                raise ValueError(f"MatchType {template_id}: {kind!r} is not a socket type")
        self.template_id = template_id
        self.allowed_types = kinds

    def as_dict(self) -> dict[str, str]:
        return {"template_id": self.template_id, "allowed_types": ",".join(kind.io_type for kind in self.allowed_types)}


class _MatchInput(Input):
    def __init__(
        self,
        id: str,
        template: _Template,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        super().__init__(id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced)
        self.template = template

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"template": self.template.as_dict()}


class _MatchOutput(Output):
    def __init__(
        self,
        template: _Template,
        id: str | None = None,
        display_name: str | None = None,
        tooltip: str | None = None,
        is_output_list: bool = False,
    ):
        super().__init__(id, display_name or id or "MATCHTYPE", tooltip, is_output_list)
        self.template = template

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"template": self.template.as_dict()}


class MatchType(ComfyTypeIO, io_type="COMFY_MATCHTYPE_V3"):
    Template = _Template
    Input = _MatchInput
    Output = _MatchOutput
