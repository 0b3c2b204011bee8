"""PipelineReference: what loaders pass to other nodes in place of weights."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import io

from ... import memory
from ...memory.host import management as host
from ...requirements import complaint
from .folders import file_stamp
from .graph import remember
from .inputs import AUTO, GPU_OR_SIM, LoaderSettings, Option
from .progress import show_text

if TYPE_CHECKING:
    import torch

    from ...pipelines import Pipeline

log = logging.getLogger("ballast")

PipelineType = io.Custom("BALLAST_PIPELINE")
ConditioningType = io.Custom("BALLAST_CONDITIONING")
OptionsType = io.Custom("BALLAST_OPTIONS")  # arguments of a pipeline's `sample`, by name

# By the model and the budgets of a reference: a key that was the reference itself would keep its pipeline alive.
_open: weakref.WeakValueDictionary[tuple, Pipeline] = weakref.WeakValueDictionary()


# A LoRA's file, its stamp, its strength, or one for each model by name, and the parts that are left out.
LoraFile = tuple[str, str, float | tuple[tuple[str, float], ...], str]


@dataclass(frozen=True, eq=False)
class ControlPicture:
    """A picture [B,H,W,3] on the CPU to follow, the file or folder of the ControlNet that does, and how.

    It counts by `strength`, in the part of the steps between two fractions. `mode` is what a union ControlNet is told.
    """

    path: str
    stamp: str
    picture: torch.Tensor
    strength: float
    part: tuple[float, float]
    mode: int | None


@dataclass(frozen=True)
class PipelineReference:
    """A reference to a pipeline to load within a budget. Small and immutable: the host may cache it for ever.

    The pipeline behind it lives as long as a reference to it does; its weights are the manager's to evict.
    """

    path: str  # a folder, or the file of a transformer
    stamp: str  # of the files, so that a changed folder is another pipeline
    dtype: str
    vram_bytes: int | None
    device: str
    keep: bool
    family: tuple[tuple[str, Option], ...] = ()  # where else its parts lie, its variant
    ram_bytes: int | None = None
    loras: tuple[LoraFile, ...] = ()
    controls: tuple[ControlPicture, ...] = ()

    def opened(self) -> Pipeline | None:
        """Return the pipeline, if it is open."""
        return _open.get(self._key())

    def open(self) -> Pipeline:
        """Return the pipeline, with the budgets of this reference; the same one for equal references."""
        pipe = self.opened()
        if pipe is None:
            budgets: dict[str, Any] = {"vram": self.vram_bytes, "ram": self.ram_bytes, "keep": self.keep}
            same = next((open_pipe for key, open_pipe in list(_open.items()) if key[0] == self._model()), None)
            if same is not None:
                pipe = same.within(**budgets)
            else:
                from ...pipelines import open_pipeline

                cache_dir = Path(folder_paths.get_user_directory()) / "ballast" / "embeddings"
                options: dict[str, Any] = {"dtype": self.dtype, "cache_dir": cache_dir, **dict(self.family)}
                options |= {"controlnet": [control.path for control in self.controls]} if self.controls else {}
                pipe = open_pipeline(self.path, self.device, **budgets, **options)
            pipe.set_loras((path, dict(s) if isinstance(s, tuple) else s, out) for path, _, s, out in self.loras)
            _open[self._key()] = pipe
        object.__setattr__(self, "_pipeline", pipe)  # the one strong hold on it
        return pipe

    def holding(self, weights: str) -> PipelineReference:
        """Return the same with its weights held in another way, as `open_pipeline` takes it."""
        others = {name: value for name, value in self.family if name != "weights"}
        return replace(self, family=tuple((others | LoaderSettings(weights=weights).weights_options()).items()))

    def following(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of `sample` and `plan` with those of its ControlNets. `given` are those that a node has.

        ValueError, in one line, where the two do not go together.
        """
        if not self.controls:
            return dict(given)
        if "control" in given:
            raise ValueError("control is connected, but Apply ControlNet has a picture already. Disconnect control.")
        if len(self.controls) > 1 and (
            counts := [len(each.picture) for each in self.controls if len(each.picture) > 1]
        ):
            raise ValueError(
                f"an Apply ControlNet has {counts[0]} pictures. With several such nodes give each of them one."
            )
        found: dict[str, Any] = {"control_strength": [each.strength for each in self.controls]}
        if any(each.part != (0.0, 1.0) for each in self.controls):
            found["control_range"] = [each.part for each in self.controls]
        if any(each.mode is not None for each in self.controls):
            found["control_mode"] = [-1 if each.mode is None else each.mode for each in self.controls]
        if len(self.controls) == 1:
            found = {name: value[0] for name, value in found.items()}
        return {**given, "control": [each.picture for each in self.controls], **found}

    def _key(self) -> tuple[tuple, tuple]:
        return self._model(), (self.vram_bytes, self.ram_bytes, self.keep, self.loras)

    def _model(self) -> tuple:
        """Return the fields that decide which model runs, and where. Budgets and LoRAs belong to a run."""
        nets = tuple((control.path, control.stamp) for control in self.controls)
        return self.path, self.stamp, self.dtype, self.device, self.family, nets

    def __repr__(self) -> str:
        return f"PipelineReference({Path(self.path).name}, {self.dtype})"


def make_reference(
    node: type[io.ComfyNode], path: Path, family: Mapping[str, Option], settings: LoaderSettings, *others: Path | None
) -> PipelineReference:
    """Make the reference of a loader's inputs, and remember it for the nodes that follow.

    `others` are files and folders that count beside `path`. It is opened, which reads configs only, so that a bad
    folder fails here.
    """
    if told := complaint(optional=False):
        raise ImportError(told)
    reference = PipelineReference(
        path=str(path),
        stamp=file_stamp(path, *others),
        dtype=settings.dtype,
        vram_bytes=int(settings.vram_gb * 2**30) or None,
        device=_device(node, settings.device),
        keep=settings.keep_loaded,
        family=(*family.items(), *settings.weights_options().items()),
        ram_bytes=int(settings.ram_gb * 2**30) or None,
    )
    reference.open()
    remember(node, reference)
    return reference


def _device(node: type[io.ComfyNode], chosen: str) -> str:
    """Return the device that a loader's input means, as `open_pipeline` takes it. A note of it is shown in the node."""
    own = host.device()
    is_gpu = own is not None and own.type != "cpu"
    if chosen == GPU_OR_SIM:
        chosen = AUTO if is_gpu else "sim"
    if chosen == "sim" and is_gpu:
        # torch knows one accelerator in a process; a simulated one beside a real one would take its place.
        raise ValueError(f"device is sim, but ComfyUI runs on {own}. Choose auto, or start ComfyUI with --cpu.")
    if chosen == "sim" and (reason := memory.simulated.supported()):
        told = f"device is sim, but this runs on the CPU: {reason}."
        log.warning("Ballast: %s", told)
        show_text(node, told)
        return "cpu"
    return str(own or AUTO) if chosen == AUTO else chosen


def with_lora(node: type[io.ComfyNode], reference: PipelineReference, *loras: LoraFile) -> PipelineReference:
    """Make the reference with further LoRAs, and remember it for the nodes that follow.

    It is opened, which reads the files, so that one of another model fails here.
    """
    made = replace(reference, loras=(*reference.loras, *loras)) if loras else reference
    made.open()
    remember(node, made)
    return made


def with_control(node: type[io.ComfyNode], reference: PipelineReference, control: ControlPicture) -> PipelineReference:
    """Make the reference with a further ControlNet, and remember it for the nodes that follow.

    It is opened, which reads no weights, so that a ControlNet of another model fails here.
    """
    if "controlnet" in dict(reference.family):
        raise ValueError(
            "the loader has a ControlNet already. Set its controlnet to none, and choose that here as well."
        )
    made = replace(reference, controls=(*reference.controls, control))
    made.open()
    remember(node, made)
    return made
