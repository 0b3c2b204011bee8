"""Models on a pretend card: the rules by which the host loads, shrinks and evicts what packs register.

`machine` sets the card for a test; `reset()` puts everything back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from .cli_args import args

OOM_EXCEPTION = torch.OutOfMemoryError


class VRAMState(Enum):
    DISABLED = 0
    NO_VRAM = 1
    LOW_VRAM = 2
    NORMAL_VRAM = 3
    HIGH_VRAM = 4
    SHARED = 5


class InterruptProcessingException(BaseException):
    pass


@dataclass
class Machine:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    total_bytes: int = 24 << 30
    reserved_bytes: int = 400 << 20
    free_bytes: Callable[[torch.device], int] | None = None
    cache_clears: int = 0
    free_requests: list[tuple[float, torch.device | None]] = field(default_factory=list)


machine = Machine()
current_loaded_models: list[LoadedModel] = []
vram_state = VRAMState.NORMAL_VRAM
_interrupt = False
_interrupt_lock = threading.RLock()


def reset() -> None:
    global machine, vram_state
    machine = Machine()
    vram_state = VRAMState.NORMAL_VRAM
    current_loaded_models.clear()
    interrupt_current_processing(False)


class LoadedModel:
    """One entry of the list; it holds the patcher and its module weakly."""

    def __init__(self, model: Any):
        self._model = weakref.ref(model)
        self.device = model.load_device
        self.real_model: Callable[[], Any] | None = None
        self.model_finalizer: weakref.finalize | None = None
        self.currently_used = True

    @property
    def model(self) -> Any:
        return self._model()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadedModel) and self.model is other.model

    __hash__ = None

    def is_dead(self) -> bool:
        return self.real_model() is not None and self.model is None

    def model_memory(self) -> int:
        return self.model.model_size()

    def model_loaded_memory(self) -> int:
        return self.model.loaded_size()

    def model_offloaded_memory(self) -> int:
        return self.model.model_size() - self.model.loaded_size()

    def model_memory_required(self, device: torch.device) -> int:
        here = device == self.model.current_loaded_device()
        return self.model_offloaded_memory() if here else self.model_memory()

    def model_load(self, extra_memory: float, force_patch_weights: bool = False) -> None:
        self.model.model_patches_to(self.device)
        self.model.model_patches_to(self.model.model_dtype())
        self.model.partially_load(self.device, extra_memory, force_patch_weights=force_patch_weights)
        module = self.model.model
        self.real_model = weakref.ref(module)
        self.model_finalizer = weakref.finalize(module, cleanup_models)
        self.model_finalizer.atexit = False

    def model_unload(self, memory_to_free: float | None = None, unpatch_weights: bool = True) -> bool:
        if memory_to_free is not None and memory_to_free < self.model.loaded_size():
            freed = self.model.partially_unload(self.model.offload_device, memory_to_free)
            if freed >= memory_to_free:
                return False
        self.model.detach(unpatch_weights)
        self.model_finalizer.detach()
        self.model_finalizer = self.real_model = None
        return True


def cleanup_models() -> None:
    current_loaded_models[:] = [entry for entry in current_loaded_models if entry.real_model() is not None]


def loaded_models(only_currently_used: bool = False) -> list[Any]:
    return [entry.model for entry in current_loaded_models if entry.currently_used or not only_currently_used]


def free_memory(
    memory_required: float,
    device: torch.device | None,
    keep_loaded: Sequence[LoadedModel] = (),
    for_dynamic: bool = False,
    pins_required: int = 0,
    ram_required: int = 0,
) -> list[LoadedModel]:
    machine.free_requests.append((memory_required, device))
    candidates = [
        entry
        for entry in current_loaded_models
        if (device is None or entry.device == device) and entry not in keep_loaded and not entry.is_dead()
    ]
    for entry in candidates:
        entry.currently_used = False
    candidates.sort(key=lambda entry: (-entry.model_offloaded_memory(), entry.model_memory()))
    gone = []
    for entry in candidates:
        if device is None:
            missing = 0.0
        elif args.disable_smart_memory:
            missing = 1e32
        else:
            missing = memory_required - get_free_memory(device)
        if missing > 0 and entry.model_unload(missing):
            gone.append(entry)
    current_loaded_models[:] = [entry for entry in current_loaded_models if all(entry is not other for other in gone)]
    if gone:
        soft_empty_cache()
    return gone


def load_models_gpu(
    models: list[Any],
    memory_required: float = 0,
    force_patch_weights: bool = False,
    minimum_memory_required: float | None = None,
    force_full_load: bool = False,
) -> None:
    extra = max(minimum_inference_memory(), memory_required + extra_reserved_memory())
    floor = extra
    if minimum_memory_required is not None:
        floor = max(minimum_inference_memory(), minimum_memory_required + extra_reserved_memory())
    wanted = list(dict.fromkeys(patcher for model in models for patcher in (model, *model.model_patches_models())))
    entries = []
    for patcher in reversed(wanted):
        entry = LoadedModel(patcher)
        if entry in current_loaded_models:
            entry = current_loaded_models[current_loaded_models.index(entry)]
            entry.currently_used = True
        entries.append(entry)

    for entry in entries:
        for old in [old for old in current_loaded_models if entry.model.is_clone(old.model)]:
            current_loaded_models[:] = [other for other in current_loaded_models if other is not old]
            old.model.detach(unpatch_all=False)
            old.model_finalizer.detach()

    needs: dict[torch.device, float] = {}
    for entry in entries:
        needs[entry.device] = needs.get(entry.device, 0) + entry.model_memory_required(entry.device)
        entry.model.is_dynamic()
    for device, need in needs.items():
        if device.type != "cpu":
            free_memory(need * 1.1 + extra, device)
            if get_free_memory(device) < floor:
                free_memory(floor, device)

    for entry in entries:
        entry.model_load(_grant(entry, floor, force_full_load), force_patch_weights)
        current_loaded_models.insert(0, entry)


def _grant(entry: LoadedModel, floor: float, force_full_load: bool) -> float:
    """How many more bytes the entry may put on its device; 1e32 stands for no limit."""
    if entry.device.type == "cpu" or force_full_load:
        return 1e32
    if vram_state is VRAMState.NO_VRAM:
        return 0.1
    if vram_state not in (VRAMState.LOW_VRAM, VRAMState.NORMAL_VRAM):
        return 1e32
    loaded = entry.model_loaded_memory()
    free = get_free_memory(entry.device) + loaded
    return max(0, free - floor) - loaded or 0.1


def load_model_gpu(model: Any) -> None:
    load_models_gpu([model])


def unload_all_models() -> None:
    free_memory(1e30, machine.device)


def get_torch_device() -> torch.device:
    return machine.device


def get_free_memory(dev: torch.device | None = None, torch_free_too: bool = False) -> Any:
    dev = machine.device if dev is None else dev
    if machine.free_bytes is not None:
        free = machine.free_bytes(dev)
    else:
        free = machine.total_bytes - sum(
            entry.model_loaded_memory() for entry in current_loaded_models if entry.device == dev
        )
    return (free, free) if torch_free_too else free


def get_total_memory(dev: torch.device | None = None, torch_total_too: bool = False) -> Any:
    return (machine.total_bytes, machine.total_bytes) if torch_total_too else machine.total_bytes


def extra_reserved_memory() -> int:
    return machine.reserved_bytes


def minimum_inference_memory() -> float:
    return 0.8 * (1 << 30) + extra_reserved_memory()


def unet_offload_device() -> torch.device:
    return machine.device if vram_state is VRAMState.HIGH_VRAM else torch.device("cpu")


def text_encoder_device() -> torch.device:
    return machine.device


def vae_device() -> torch.device:
    return torch.device("cpu") if args.cpu_vae else machine.device


def intermediate_device() -> torch.device:
    return machine.device if args.gpu_only else torch.device("cpu")


def intermediate_dtype() -> torch.dtype:
    return torch.float32


def cpu_mode() -> bool:
    return machine.device.type == "cpu"


def is_device_cpu(device: Any) -> bool:
    return getattr(device, "type", None) == "cpu"


def is_device_cuda(device: Any) -> bool:
    return getattr(device, "type", None) == "cuda"


def device_supports_non_blocking(device: Any) -> bool:
    return getattr(device, "type", None) == "cuda"


def pin_memory(tensor: torch.Tensor) -> bool:
    """Pin for a simulated card that copies as CUDA does. Other cards here have no use for it."""
    from ballast.memory.simulated.lazy import Cudart, copies

    return copies.mode == "cuda" and Cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1) == 0


def unpin_memory(tensor: torch.Tensor) -> bool:
    from ballast.memory.simulated.lazy import Cudart

    return Cudart.cudaHostUnregister(tensor.data_ptr()) == 0


def soft_empty_cache(force: bool = False) -> None:
    machine.cache_clears += 1


def is_oom(e: BaseException) -> bool:
    return isinstance(e, OOM_EXCEPTION)


def interrupt_current_processing(value: bool = True) -> None:
    global _interrupt
    with _interrupt_lock:
        _interrupt = value


def processing_interrupted() -> bool:
    with _interrupt_lock:
        return _interrupt


def throw_exception_if_processing_interrupted() -> None:
    global _interrupt
    with _interrupt_lock:
        if _interrupt:
            _interrupt = False
            raise InterruptProcessingException()
