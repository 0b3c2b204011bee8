"""Host buffers: the weights of one group in one flat, page-aligned stretch of RAM, so that one copy moves the group.

The module's tensors become views into the buffer, so RAM holds the weights once. The buffer is freed with its last
view. Offsets in it are multiples of `ALIGNMENT_BYTES`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import ram, simulated
from ..errors import release_frames
from ..host import management as host
from ..simulated.lazy import copies as simulated_copies
from ..sizes import format_bytes
from . import huge_pages

ALIGNMENT_BYTES = 256
_PINNED_SHARE = 0.5  # of RAM: pinned pages cannot be swapped out, and other programs need some

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card, not only for the current one

_lock = threading.Lock()
_pinned_bytes = 0  # pinned by us; ComfyUI counts those that it pins for us
_left_paged: set[torch.device] = set()  # see `leave_paged`


class _Pages(mmap.mmap):
    """Anonymous memory on pages of its own, which can be pinned.

    Torch's pinned allocator would round the size up to a power of two.
    """

    first, nbytes = 0, 0  # byte of the mapping where the buffer begins, and bytes of the buffer
    cudart: Any = None  # the runtime that the pages are registered with; None if they are not
    stand_in: torch.Tensor | None = None  # the tensor that the host knows the pages by, if it has pinned them
    address = 0

    def pin(self, address: int, device: torch.device) -> bool:
        """Pin the pages for copies by CUDA or ROCm, through ComfyUI if it pins for others. Return whether they are."""
        if self.cudart is not None or self.stand_in is not None:
            return True
        # A tensor that does not own the pages: one that did would keep them alive as long as the host has it.
        stand_in = torch.frombuffer((ctypes.c_ubyte * self.nbytes).from_address(address), dtype=torch.uint8)
        try:
            by_host = host.pin_memory(stand_in)
        except (RuntimeError, AttributeError):
            return False
        if by_host is None:
            return self._register(address, device)
        self.stand_in = stand_in if by_host else None
        return by_host

    def _register(self, address: int, device: torch.device) -> bool:
        """Pin the pages ourselves. False if the driver refuses, or more than `_PINNED_SHARE` of RAM would be pinned."""
        global _pinned_bytes
        with _lock:
            if _pinned_bytes + self.nbytes > _PINNED_SHARE * ram.total_bytes():
                return False
            try:
                backend = torch.get_device_module(device)
                cudart = backend.cudart()
                with backend.device(device):  # else card 0 would get a CUDA context of some hundred MB
                    if int(cudart.cudaHostRegister(address, self.nbytes, _PORTABLE)) != 0:
                        return False
            except (RuntimeError, AttributeError):
                return False
            self.cudart, self.address = cudart, address
            _pinned_bytes += self.nbytes
        return True

    def unpin(self) -> None:
        """Unpin the pages. No copy from or to them may be under way."""
        # No lock: the garbage collector may run this in a thread that holds it.
        global _pinned_bytes
        if self.stand_in is not None:
            with contextlib.suppress(Exception):
                host.unpin_memory(self.stand_in)
            self.stand_in = None
        if self.cudart is not None:
            with contextlib.suppress(Exception):
                self.cudart.cudaHostUnregister(self.address)
            self.cudart = None
            _pinned_bytes -= self.nbytes

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():  # then the driver may be gone, and takes its registrations along
            self.unpin()  # pages must not go back to the system while they are registered with the driver


_pages: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()


def layout(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the byte where each tensor begins in a flat buffer, and the bytes of the buffer."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def can_pack(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can lie in a flat buffer: plain, dense, and on the CPU or `meta`.

    Subclasses such as quantized tensors, and tensors with gaps between their elements, cannot.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type not in ("cpu", "meta"):
        return False
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def view_of(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a flat buffer that holds `like`, with its dtype, shape and strides."""
    return flat[offset : offset + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def place_of(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return the view that a module holds instead of `like`: as `view_of`, and a parameter if `like` is one."""
    with torch.inference_mode(False), torch.no_grad():
        view = view_of(flat, offset, like)
        return torch.nn.Parameter(view, requires_grad=False) if isinstance(like, torch.nn.Parameter) else view


def allocate(nbytes: int) -> torch.Tensor:
    """Return a zeroed flat buffer of `nbytes` (at least 1), uint8, on pages of its own.

    Raises MemoryError, in one line, if the system has no RAM for it. On Windows its page file may be too small.
    """
    try:
        pages = _map(nbytes)
    except OSError as error:
        raise MemoryError(
            f"the system refuses {format_bytes(nbytes)} of RAM for weights ({error.strerror or error}). "
            "Close other programs, enlarge the page file, or lower the RAM budget."
        ) from error
    with torch.inference_mode(False):
        buffer = torch.frombuffer(pages, dtype=torch.uint8, offset=pages.first, count=pages.nbytes)
    _pages[buffer.data_ptr()] = pages
    return buffer


def _map(nbytes: int) -> _Pages:
    """Return pages for a buffer of `nbytes`, private to this process: shared ones are never huge, and slow to get.

    The whole huge pages in a large buffer are asked for as such, where `huge_pages` found them faster. This takes no
    more RAM: the tail stays on plain pages.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        pages = _Pages(-1, nbytes)  # of Windows
        pages.nbytes = nbytes
        return pages
    whole = nbytes // huge_pages.PAGE_BYTES * huge_pages.PAGE_BYTES if hasattr(mmap, "MADV_HUGEPAGE") else 0
    # The bytes ahead of the first huge page are never touched, and so take no RAM.
    pages = _Pages(-1, nbytes + (huge_pages.PAGE_BYTES if whole else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.nbytes = nbytes
    with contextlib.suppress(OSError):  # a kernel that has none of it
        if hasattr(mmap, "MADV_DONTFORK"):  # after a fork, each page that the parent writes to would be copied
            pages.madvise(mmap.MADV_DONTFORK)
        if whole:
            pages.first = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % huge_pages.PAGE_BYTES
            pages.madvise(mmap.MADV_NOHUGEPAGE, pages.first + whole)
            huge_pages.advise(pages, pages.first, whole)
    return pages


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat buffer of this module, for readers to write to."""
    pages = _pages.get(flat.data_ptr())
    if pages is None:  # allocated by torch, see `window`
        return memoryview((ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())).cast("B")
    return memoryview(pages)[pages.first : pages.first + pages.nbytes]


def pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a flat buffer with the tensors' values, and the tensors as views into it.

    Tensors that are laid out so already are returned as they are. Else the values are copied: the caller must put the
    views in the tensors' place to free the old memory.
    """
    offsets, total = layout(tensors)
    with torch.inference_mode(False), torch.no_grad():
        if flat := _packed(tensors, offsets, total):
            return flat[0], list(tensors)
        buffer = allocate(total)
        views = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            view = place_of(buffer, offset, tensor)
            view.copy_(tensor)
            views.append(view)
        return buffer, views


def is_packed(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether `pack` would copy nothing."""
    return bool(_packed(tensors, *layout(tensors)))


def _packed(tensors: Sequence[torch.Tensor], offsets: list[int], total: int) -> list[torch.Tensor]:
    """Return a list with the buffer that the tensors are laid out in; an empty list if they are not."""
    storage = tensors[0].untyped_storage()
    start = storage.data_ptr()
    if start not in _pages or storage.nbytes() != total:
        return []
    if any(t.data_ptr() != start + at for t, at in zip(tensors, offsets, strict=True) if t.nbytes):
        return []
    return [torch.empty(0, dtype=torch.uint8).set_(storage, 0, (total,), (1,))]


def pins_by_torch(device: torch.device) -> bool:
    """Return whether only memory that torch allocated as pinned is pinned for a device, as for XPU."""
    return _copies_as(device) == "xpu"


def wants_pinned(device: torch.device) -> bool:
    """Return whether copies to a device are asynchronous and fast only from pinned memory."""
    return _copies_as(device) in ("cuda", "xpu") and device not in _left_paged


def _copies_as(device: torch.device) -> str:
    """Return the type of a device; for a simulated one the type that it copies like."""
    return simulated_copies.mode if device.type == simulated.DEVICE_TYPE else device.type


def window(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a flat buffer of `nbytes` for staging, which can be pinned for a device where any memory can.

    Torch may take twice as much RAM for it, so it is for small buffers that are used again and again.
    """
    if pins_by_torch(device) and wants_pinned(device):
        with contextlib.suppress(RuntimeError), torch.inference_mode(False):  # if refused: pageable memory works too
            return torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    return allocate(nbytes)


def leave_paged(device: torch.device) -> None:
    """Pin nothing for a device from now on. `probe` found copies from pageable memory much faster there."""
    _left_paged.add(device)


def unpin(flat: torch.Tensor) -> None:
    """Undo `pin`. No copy from or to the buffer may be under way."""
    if pages := _pages.get(flat.data_ptr()):
        pages.unpin()


def pin(flat: torch.Tensor, device: torch.device) -> bool:
    """Pin a buffer made here for copies to a device. False if it stays pageable, which is slower but works."""
    if pins_by_torch(device):
        return wants_pinned(device) and flat.is_pinned()
    pages = _pages.get(flat.data_ptr())
    if not wants_pinned(device) or pages is None:
        return False
    if pages.pin(flat.data_ptr(), device):
        return True
    # A refusal stays behind as CUDA's last error, which the next kernel would raise. This one takes it.
    try:
        torch.ones(1, device=device).add_(1)
    except Exception as error:
        release_frames(error)  # others may hold it, and with it the tensor
    return False
