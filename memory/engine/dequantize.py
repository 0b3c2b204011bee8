"""Dequantization on the device: encoded weights are plain tensors for the time of their module's call.

They are dequantized on the compute stream, in the order of the calls. All modules share one workspace, and each call
overwrites the weights of the call before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..codecs import fused
from ..codecs.codec import Codec
from ..weights.encoding import split
from ..weights.groups import Owner, aligned, encoded, workspace_bytes
from ..weights.structure import ParameterRef


class Workspace:
    """Device memory for the dequantized weights of one module at a time, as large as the largest of `owners` needs.

    `nbytes` is 0 if no weight is encoded.
    """

    def __init__(self, owners: Sequence[Owner], device: torch.device) -> None:
        self.nbytes = workspace_bytes(owners)
        self._device = device
        self._memory: torch.Tensor | None = None
        self._views: dict[int, list[tuple[ParameterRef, Codec, nn.Parameter]]] = {}  # by `id` of the owner

    def open(self) -> None:
        """Allocate the memory."""
        if self.nbytes:
            with torch.inference_mode(False):
                self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Free the memory."""
        self._memory = None
        self._views.clear()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view into the workspace."""
        memory = self._memory
        return memory is not None and tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()

    @contextmanager
    def decoded(self, owner: Owner) -> Iterator[None]:
        """Show a module its encoded weights dequantized, from their bytes on the device (`ParameterRef.here`).

        Weights without such bytes are skipped: they are kept dequantized.
        """
        if id(owner) not in self._views:
            self._views[id(owner)] = self._make_views(owner)
        views = [view for view in self._views[id(owner)] if view[0].here is not None]
        try:
            with torch.no_grad():
                done: dict[int, Any] = {}
                for ref, codec, view in views:
                    if id(view) not in done:  # tied parameters share a view
                        fused.decode(codec, split(codec, ref.here), view.detach())  # type: ignore[arg-type]
                        done[id(view)] = ref
                    ref.holder[ref.key] = view
            yield
        finally:  # the next module overwrites the views: nobody may find them in this one
            for ref, _, _ in views:
                ref.holder[ref.key] = ref.shown

    def _make_views(self, owner: Owner) -> list[tuple[ParameterRef, Codec, nn.Parameter]]:
        """Return each encoded parameter of a module with its codec and its plain view into the workspace."""
        assert self._memory is not None
        made: dict[int, nn.Parameter] = {}
        views, end = [], 0
        with torch.inference_mode(False), torch.no_grad():
            for ref, codec in encoded(owner.refs):
                if id(ref.tensor) not in made:
                    flat = self._memory[end : end + codec.decoded_bytes].view(codec.dtype)
                    made[id(ref.tensor)] = nn.Parameter(flat.view(codec.shape), requires_grad=False)
                    end += aligned(codec.decoded_bytes)
                views.append((ref, codec, made[id(ref.tensor)]))
        return views


def decode(codec: Codec, here: torch.Tensor) -> nn.Parameter:
    """Return an encoded parameter as a plain tensor of its own, on the device of its stored bytes `here`."""
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(codec.shape, dtype=codec.dtype, device=here.device)
        fused.decode(codec, split(codec, here), made)
        return nn.Parameter(made, requires_grad=False)
