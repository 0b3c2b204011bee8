"""Print the names and signatures that the stand-ins define, as found under a folder.

    python parity.py FOLDER      FOLDER is this one, or a ComfyUI

A test compares the two answers: each name here must exist there, with the same parameters and defaults.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

NAMES = {
    "comfy.model_management": (
        "LoadedModel InterruptProcessingException cleanup_models cpu_mode device_supports_non_blocking "
        "extra_reserved_memory free_memory get_free_memory get_torch_device get_total_memory "
        "intermediate_device intermediate_dtype interrupt_current_processing is_device_cpu "
        "is_device_cuda is_oom load_model_gpu load_models_gpu loaded_models minimum_inference_memory "
        "pin_memory processing_interrupted soft_empty_cache text_encoder_device "
        "throw_exception_if_processing_interrupted unet_offload_device unload_all_models unpin_memory "
        "vae_device"
    ),
    "comfy.utils": "ProgressBar set_progress_bar_global_hook",
    "comfy.latent_formats": "LatentFormat",
    "comfy_api.internal": "first_real_override make_locked_method_func",
    "comfy_api.latest.ui": "PreviewImage PreviewText SavedImages SavedResult",
    "comfy_execution.graph_utils": "ExecutionBlocker",
    "comfy_execution.utils": "CurrentNodeContext get_executing_context",
    "folder_paths": (
        "add_model_folder_path get_filename_list get_folder_paths get_full_path get_full_path_or_raise "
        "get_input_directory get_output_directory get_save_image_path get_system_user_directory "
        "get_temp_directory get_user_directory"
    ),
    "latent_preview": "get_previewer",
}
IO_NAMES = (
    "AnyType Audio Boolean Clip ClipVision Combo Conditioning ControlNet Float Guider Image Int Latent Mask "
    "MatchType Model MultiType Noise Sampler Sigmas String Vae Video"
)
IO_PLAIN = "ControlAfterGenerate Custom FolderType Hidden NodeOutput NumberDisplay Schema UploadType"
METHODS = ("send_progress_text", "send_sync")


def _signature(thing: Any) -> Any:
    if isinstance(thing, type) and issubclass(thing, Enum):
        return {member.name: member.value for member in thing}
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return [base.__name__ for base in thing.__mro__]
    parameters = inspect.signature(thing).parameters.values()
    return [f"{p.name}={_default(p.default)}" for p in parameters]


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if value == () or value == []:
        return "empty"
    text = getattr(value, "__name__", None) or repr(value)
    return "factory" if "factory" in text else text


def _entries() -> Iterator[tuple[str, Any]]:
    import server
    from comfy_api.latest import io, ui

    for name in IO_NAMES.split():
        kind = getattr(io, name)
        yield f"io.{name}", kind.io_type
        for slot in ("Input", "Output", "Template"):
            if hasattr(kind, slot):
                yield f"io.{name}.{slot}", _signature(getattr(kind, slot))
    for name in IO_PLAIN.split():
        yield f"io.{name}", _signature(getattr(io, name))
    for module_name, names in NAMES.items():
        module = ui if module_name == "comfy_api.latest.ui" else importlib.import_module(module_name)
        for name in names.split():
            yield f"{module_name}.{name}", _signature(getattr(module, name))
    for name in METHODS:
        yield f"server.PromptServer.{name}", _signature(getattr(server.PromptServer, name))


if __name__ == "__main__":
    sys.path[0] = str(Path(sys.argv[1]).resolve())
    from comfy.cli_args import args

    args.cpu = True
    print(json.dumps(dict(_entries()), indent=1))
