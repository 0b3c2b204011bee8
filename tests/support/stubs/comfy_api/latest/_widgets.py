"""Types that the page draws as widgets."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ._base import (
    ComfyTypeIO,
    ControlAfterGenerate,
    FolderType,
    NumberDisplay,
    Output,
    UploadType,
    WidgetInput,
    drop_none,
)


class _BooleanInput(WidgetInput):
    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        default: bool | None = None,
        label_on: str | None = None,
        label_off: str | None = None,
        socketless: bool | None = None,
        force_input: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        super().__init__(
            id,
            display_name,
            optional,
            tooltip,
            lazy,
            default,
            socketless,
            None,
            force_input,
            extra_dict,
            raw_link,
            advanced,
        )
        self.label_on = label_on
        self.label_off = label_off

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | drop_none({"label_on": self.label_on, "label_off": self.label_off})


class Boolean(ComfyTypeIO, io_type="BOOLEAN"):
    Type = bool
    Input = _BooleanInput


class _IntInput(WidgetInput):
    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        default: int | None = None,
        min: int | None = None,
        max: int | None = None,
        step: int | None = None,
        control_after_generate: bool | ControlAfterGenerate | None = None,
        display_mode: NumberDisplay | None = None,
        socketless: bool | None = None,
        force_input: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        super().__init__(
            id,
            display_name,
            optional,
            tooltip,
            lazy,
            default,
            socketless,
            None,
            force_input,
            extra_dict,
            raw_link,
            advanced,
        )
        self.min = min
        self.max = max
        self.step = step
        self.control_after_generate = control_after_generate
        self.display_mode = display_mode

    def as_dict(self) -> dict[str, Any]:
        display = self.display_mode.value if self.display_mode else None
        return super().as_dict() | drop_none(
            {
                "min": self.min,
                "max": self.max,
                "step": self.step,
                "control_after_generate": self.control_after_generate,
                "display": display,
            }
        )


class Int(ComfyTypeIO, io_type="INT"):
    Type = int
    Input = _IntInput


class _FloatInput(WidgetInput):
    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        default: float | None = None,
        min: float | None = None,
        max: float | None = None,
        step: float | None = None,
        round: float | None = None,
        display_mode: NumberDisplay | None = None,
        gradient_stops: list[dict] | None = None,
        socketless: bool | None = None,
        force_input: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        super().__init__(
            id,
            display_name,
            optional,
            tooltip,
            lazy,
            default,
            socketless,
            None,
            force_input,
            extra_dict,
            raw_link,
            advanced,
        )
        self.min = min
        self.max = max
        self.step = step
        self.round = round
        self.display_mode = display_mode
        self.gradient_stops = gradient_stops

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | drop_none(
            {
                "min": self.min,
                "max": self.max,
                "step": self.step,
                "round": self.round,
                "display": self.display_mode,
                "gradient_stops": self.gradient_stops,
            }
        )


class Float(ComfyTypeIO, io_type="FLOAT"):
    Type = float
    Input = _FloatInput


class _StringInput(WidgetInput):
    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        multiline: bool = False,
        placeholder: str | None = None,
        default: str | None = None,
        dynamic_prompts: bool | None = None,
        socketless: bool | None = None,
        force_input: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        super().__init__(
            id,
            display_name,
            optional,
            tooltip,
            lazy,
            default,
            socketless,
            None,
            force_input,
            extra_dict,
            raw_link,
            advanced,
        )
        self.multiline = multiline
        self.placeholder = placeholder
        self.dynamic_prompts = dynamic_prompts

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | drop_none(
            {"multiline": self.multiline, "placeholder": self.placeholder, "dynamicPrompts": self.dynamic_prompts}
        )


class String(ComfyTypeIO, io_type="STRING"):
    Type = str
    Input = _StringInput


class _ComboInput(WidgetInput):
    def __init__(
        self,
        id: str,
        options: list | type[Enum] | None = None,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        default: str | int | Enum | None = None,
        control_after_generate: bool | ControlAfterGenerate | None = None,
        upload: UploadType | None = None,
        image_folder: FolderType | None = None,
        remote: Any = None,
        socketless: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        if isinstance(options, type) and issubclass(options, Enum):
            options = [member.value for member in options]
        default = default.value if isinstance(default, Enum) else default
        super().__init__(
            id, display_name, optional, tooltip, lazy, default, socketless, None, None, extra_dict, raw_link, advanced
        )
        self.multiselect = False
        self.options = options
        self.control_after_generate = control_after_generate
        self.upload = upload
        self.image_folder = image_folder
        self.remote = remote

    def as_dict(self) -> dict[str, Any]:
        entries = {
            "multiselect": self.multiselect,
            "options": self.options,
            "control_after_generate": self.control_after_generate,
            "image_folder": self.image_folder.value if self.image_folder else None,
            "remote": self.remote.as_dict() if self.remote else None,
        }
        if self.upload is not None:
            entries[self.upload.value] = True
        return super().as_dict() | drop_none(entries)


class _ComboOutput(Output):
    def __init__(
        self,
        id: str | None = None,
        display_name: str | None = None,
        options: list[str] | None = None,
        tooltip: str | None = None,
        is_output_list: bool = False,
    ):
        super().__init__(id, display_name, tooltip, is_output_list)
        self.options = options or []


class Combo(ComfyTypeIO, io_type="COMBO"):
    Type = str
    Input = _ComboInput
    Output = _ComboOutput
