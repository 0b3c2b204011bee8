"""Conditioning: what the text encoders make of one prompt pair, as named tensors on the CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_LIST = "#"  # `name#3` in a file is item 3 of the list `name`
_NAME = re.compile(rf"(\w+)(?:{_LIST}(\d{{1,6}}))?")


@dataclass(frozen=True)
class Conditioning:
    """Named tensors (or lists of them, where prompts differ in length) of one prompt and its negative.

    Names are those of the pipeline's own arguments, such as `prompt_embeds` [B, tokens, channels]. `info` says what
    they were made from, `pictures` [H,W,3] are those that came with the prompt.
    """

    tensors: Mapping[str, torch.Tensor | list[torch.Tensor]]
    info: Mapping[str, str] = field(default_factory=dict)
    pictures: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor | list[torch.Tensor]], info: Mapping[str, str] | None = None
    ) -> Conditioning:
        """From tensors on any device, which may have some `info` of their own."""
        info = {**getattr(tensors, "info", {}), **(info or {})}

        def moved(given: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
            return to_host(given) if isinstance(given, torch.Tensor) else [to_host(one) for one in given]

        return cls({name: moved(given) for name, given in tensors.items()}, info)

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how the prompts were read, such as where one was cut; a sentence each."""
        return [note for note in self.info.get("notes", "").split("\n") if note]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._flat().values())

    def to(
        self, device: torch.device, dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Return the tensors on a device, floating-point ones in `dtype` if given."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        return {k: [move(t) for t in v] if isinstance(v, list) else move(v) for k, v in self.tensors.items()}

    def copy(self) -> Conditioning:
        """Return a conditioning that shares no memory with this one."""
        return Conditioning.of(self.tensors, self.info)

    def save(self, path: Path) -> None:
        """Write as safetensors."""
        from safetensors.torch import save_file

        save_file(self._flat(), path, metadata={"ballast": json.dumps(dict(self.info))})

    @classmethod
    def load(cls, path: Path) -> Conditioning:
        """Read what `save` wrote. Raises an error of safetensors, or ValueError, for anything else."""
        from safetensors import safe_open

        tensors: dict[str, torch.Tensor | list[torch.Tensor]] = {}
        with safe_open(path, framework="pt") as file:
            try:
                info = json.loads((file.metadata() or {})["ballast"])
            except (KeyError, RecursionError) as error:
                raise ValueError("it does not say what it was made from") from error
            if not isinstance(info, dict) or not all(isinstance(value, str) for value in info.values()):
                raise ValueError("what it says it was made from is no text")
            names = [_NAME.fullmatch(name) for name in file.keys()]  # noqa: SIM118 (it is no dictionary)
            if None in names:
                raise ValueError("it has names that no embedding has")
            for match in sorted(filter(None, names), key=lambda match: (match[1], int(match[2] or 0))):
                tensor = to_host(file.get_tensor(match[0]))  # else the file stays mapped, and cannot be replaced
                if match[2] is None:
                    tensors[match[1]] = tensor
                    continue
                items = tensors.setdefault(match[1], [])
                if not isinstance(items, list) or len(items) != int(match[2]):
                    raise ValueError(f"its list {match[1]} is not whole")
                items.append(tensor)
        return cls(tensors, info)

    def _flat(self) -> dict[str, torch.Tensor]:
        flat: dict[str, torch.Tensor] = {}
        for name, value in self.tensors.items():
            if isinstance(value, list):
                flat |= {f"{name}{_LIST}{i}": tensor for i, tensor in enumerate(value)}
            else:
                flat[name] = value
        return flat

    def _comfy_cache_tensors(self) -> list[torch.Tensor]:
        # Asked by ComfyUI's cache of outputs, which drops the largest first when RAM is short.
        return [*self._flat().values(), *self.pictures]

    def __repr__(self) -> str:
        return f"Conditioning({', '.join(self.tensors)}; {self.info.get('prompt', '')[:60]!r})"


def is_embeddings(value: Any) -> bool:
    """Return whether an option of `encode` is a tensor, or a list of them: one a prompt, as Z-Image takes them."""
    several = value if isinstance(value, list | tuple) else [value]
    return bool(several) and all(isinstance(one, torch.Tensor) for one in several)


def to_host(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU: contiguous, sharing no memory, and writable outside inference mode."""
    with torch.inference_mode(False):
        return torch.empty(value.shape, dtype=value.dtype).copy_(value)


Text = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # embeddings [B,l,c], their mask [B,l], pooled [B,c]


def pair(named: Mapping[str, torch.Tensor], prompts: int) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """Split named tensors of `prompts` prompts and then their negatives: the latter get names `negative_...`."""
    found: dict[str, torch.Tensor | list[torch.Tensor]] = {}
    for name, value in named.items():
        found |= {name: value[:prompts], f"negative_{name}": value[prompts:]}
    return found


def text_of(tensors: Mapping[str, Any], sign: str = "") -> Text:
    """Return the prompt's embeddings, mask and pooled embeddings. With `sign` "negative_", the negative prompt's."""
    names = ("prompt_embeds", "prompt_attention_mask", "pooled_prompt_embeds")
    embeds, mask, pooled = (tensors[f"{sign}{name}"] for name in names)
    return embeds, mask, pooled
