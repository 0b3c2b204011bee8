"""Record the text encoding of a pipeline's own call once, and replay it while it samples.

For classes whose call takes no embeddings, or not all that it makes of a prompt. Their call is given the prompts
themselves in both stages. An answer is known by the method and by all that it was asked, so none is taken for another.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..encoding.conditioning import Conditioning
from .signatures import encoding_methods

RECORD = "record"  # the name in `Conditioning.info`
SCALES = ("guidance_scale", "true_cfg_scale")  # of which only counts whether they guide
_PLACES = ("device", "dtype")  # which decide where and how a stage runs, and are the same in both


class Recorded(dict[str, Any]):
    """Named tensors, with what a conditioning of them keeps beside."""

    info: Mapping[str, str]


class Recording:
    """Answers of a pipeline's encoding of prompts, by the method and its arguments."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked = 0  # and answered, how many times
        self.sees = False  # whether it was asked with pictures

    def listen(self, pipe: Any) -> None:
        """Keep what the pipeline's methods answer from now on. What is known already is not run again."""
        for name in encoding_methods(type(pipe)):
            setattr(pipe, name, self._answering(name, pipe, run=True))

    def replay(self, pipe: Any) -> None:
        """Answer in place of the pipeline's methods. RuntimeError for what is not known."""
        for name in encoding_methods(type(pipe)):
            setattr(pipe, name, self._answering(name, pipe, run=False))

    def _answering(self, name: str, pipe: Any, run: bool) -> Callable[..., Any]:
        method, signature = getattr(type(pipe), name), inspect.signature(getattr(pipe, name))
        held = weakref.ref(pipe)  # or the two would keep tensors until the collector runs

        @functools.wraps(method)
        def answer(*args: Any, **kwargs: Any) -> Any:
            key = self._key(name, signature, args, kwargs)
            if key not in self.answers:
                if not run:
                    raise RuntimeError("it encodes its prompt while it samples in another way than before")
                self.answers[key] = method(held(), *args, **kwargs)
            self.asked += 1
            return _copied(self.answers[key])

        return answer

    def _key(self, name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {k: v > 1 if k in SCALES else v for k, v in bound.arguments.items() if k not in _PLACES}

        def digest(value: Any) -> Any:
            self.sees = True
            return _digest(value)

        return hashlib.sha256(json.dumps([name, given], sort_keys=True, default=digest).encode()).hexdigest()

    def tensors(self, prompts: int, **texts: Any) -> Recorded:
        """All answers as named tensors. `texts` are the arguments of the call that they belong to."""
        leaves: list[torch.Tensor] = []
        answers = {key: _apart(answer, leaves) for key, answer in self.answers.items()}
        made = Recorded((f"answer_{number}", tensor) for number, tensor in enumerate(leaves))
        made.info = {RECORD: json.dumps({"texts": texts, "answers": answers}), "prompts": str(prompts)}
        return made

    @classmethod
    def of(cls, cond: Conditioning, device: torch.device) -> tuple[Recording, dict[str, Any]]:
        """Return a conditioning's recording, on a device, and its texts. Raises ValueError if it holds no recording."""
        if RECORD not in cond.info:
            raise ValueError("the conditioning was made by another class. Encode the prompt with this pipeline.")
        record, made = json.loads(cond.info[RECORD]), cls()
        moved = cond.to(device)
        leaves = [moved[f"answer_{number}"] for number in range(len(moved))]
        made.answers = {key: _together(answer, leaves) for key, answer in record["answers"].items()}
        return made, record["texts"]


def _digest(value: Any) -> Any:
    """Return a digest of a tensor, an array or a picture. Raises TypeError for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float().numpy()
    if not hasattr(value, "__array_interface__"):
        raise TypeError(f"its prompt is encoded with {type(value).__name__}, of which no digest is known")
    import numpy as np

    array = np.ascontiguousarray(value)
    return [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def _copied(value: Any) -> Any:
    """Equal tensors that may be written to."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_copied(one) for one in value)
    return value


def _apart(value: Any, leaves: list[torch.Tensor]) -> Any:
    """Turn a tree into plain data, and add its tensors to `leaves`."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return {"tensor": len(leaves) - 1}
    if isinstance(value, list):
        return [_apart(one, leaves) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_apart(one, leaves) for one in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"its prompt is encoded to {type(value).__name__}, which cannot be kept")


def _together(value: Any, leaves: list[Any]) -> Any:
    """Rebuild the tree that `_apart` took apart."""
    if isinstance(value, list):
        return [_together(one, leaves) for one in value]
    if not isinstance(value, dict):
        return value
    return leaves[value["tensor"]] if "tensor" in value else tuple(_together(one, leaves) for one in value["tuple"])
