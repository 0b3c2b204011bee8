"""Model and user folders. `set_base(path)` gives a test folders of its own."""

from __future__ import annotations

import os
import tempfile

supported_pt_extensions = {".ckpt", ".pt", ".pt2", ".bin", ".pth", ".safetensors", ".pkl", ".sft"}

base_path = ""
models_dir = ""
folder_names_and_paths: dict[str, tuple[list[str], set[str] | list[str]]] = {}

_LEGACY_NAMES = {"unet": "diffusion_models", "clip": "text_encoders"}
_MODEL_FOLDERS = {
    "checkpoints": ["checkpoints"],
    "clip_vision": ["clip_vision"],
    "controlnet": ["controlnet", "t2i_adapter"],
    "diffusion_models": ["unet", "diffusion_models"],
    "loras": ["loras"],
    "text_encoders": ["text_encoders", "clip"],
    "vae": ["vae"],
    "vae_approx": ["vae_approx"],
}


def set_base(path: str | os.PathLike) -> None:
    """Everything under `path`, created as far as the host creates it."""
    global base_path, models_dir
    base_path = os.path.abspath(path)
    models_dir = os.path.join(base_path, "models")
    folder_names_and_paths.clear()
    for key, names in _MODEL_FOLDERS.items():
        paths = [os.path.join(models_dir, name) for name in names]
        folder_names_and_paths[key] = (paths, supported_pt_extensions)
    folder_names_and_paths["diffusers"] = ([os.path.join(models_dir, "diffusers")], ["folder"])
    folder_names_and_paths["custom_nodes"] = ([os.path.join(base_path, "custom_nodes")], set())
    for name in ("input", "output", "temp", "user"):
        os.makedirs(os.path.join(base_path, name), exist_ok=True)


def get_output_directory() -> str:
    return os.path.join(base_path, "output")


def get_temp_directory() -> str:
    return os.path.join(base_path, "temp")


def get_input_directory() -> str:
    return os.path.join(base_path, "input")


def get_user_directory() -> str:
    return os.path.join(base_path, "user")


def get_system_user_directory(name: str = "system") -> str:
    if not name.replace("_", "").isalnum() or name.startswith("_"):
        raise ValueError(f"Not a name for a system folder: {name!r}")
    return os.path.join(get_user_directory(), f"__{name}")


def add_model_folder_path(folder_name: str, full_folder_path: str, is_default: bool = False) -> None:
    paths, _ = folder_names_and_paths.setdefault(_LEGACY_NAMES.get(folder_name, folder_name), ([], set()))
    if full_folder_path in paths:
        if not is_default:
            return
        paths.remove(full_folder_path)
    paths.insert(0 if is_default else len(paths), full_folder_path)


def get_folder_paths(folder_name: str) -> list[str]:
    return list(folder_names_and_paths[_LEGACY_NAMES.get(folder_name, folder_name)][0])


def get_filename_list(folder_name: str) -> list[str]:
    """Files by extension. As in the host, `diffusers` has no file that matches: walk its folders."""
    paths, extensions = folder_names_and_paths[_LEGACY_NAMES.get(folder_name, folder_name)]
    found = set()
    for root in paths:
        for folder, _, names in os.walk(root, followlinks=True):
            for name in names:
                if not extensions or os.path.splitext(name)[1].lower() in extensions:
                    found.add(os.path.relpath(os.path.join(folder, name), root))
    return sorted(found)


def get_full_path(folder_name: str, filename: str) -> str | None:
    """A file only: for a folder the answer is None, as in the host."""
    name = os.path.relpath(os.path.join("/", filename), "/")
    for root in folder_names_and_paths.get(_LEGACY_NAMES.get(folder_name, folder_name), ([], set()))[0]:
        path = os.path.join(root, name)
        if os.path.isfile(path):
            return path
    return None


def get_full_path_or_raise(folder_name: str, filename: str) -> str:
    path = get_full_path(folder_name, filename)
    if path is None:
        raise FileNotFoundError(f"No file {filename!r} in the model folder {folder_name!r}.")
    return path


def get_save_image_path(
    filename_prefix: str, output_dir: str, image_width: int = 0, image_height: int = 0
) -> tuple[str, str, int, str, str]:
    subfolder, filename = os.path.split(os.path.normpath(filename_prefix))
    output_dir = os.path.abspath(output_dir)
    folder = os.path.abspath(os.path.join(output_dir, subfolder))
    if os.path.commonpath([folder, output_dir]) != output_dir:
        raise Exception(f"{folder} is outside of {output_dir}")
    os.makedirs(folder, exist_ok=True)
    numbers = [0]
    for name in os.listdir(folder):
        digits = name.removeprefix(filename + "_").split("_")[0].split(".")[0]
        if name.startswith(filename + "_") and digits.isdigit():
            numbers.append(int(digits))
    return folder, filename, max(numbers) + 1, subfolder, filename_prefix


set_base(tempfile.mkdtemp(prefix="comfy_stub_"))
