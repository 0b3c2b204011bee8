"""A wrapper around a module's forward, which can be undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def interpose(module: nn.Module, run: Callable[[Forward, tuple, dict], Any]) -> Callable[[], None]:
    """Make each call of a module `run(forward, args, kwargs)`. Return a function that undoes it.

    Torch's forward hooks would not do: they cannot call `forward` a second time, or not at all. Wrappers nest, and must
    be undone in reverse order.
    """
    # An attribute of the instance hides the method of its class. `previous` is the wrapper of somebody before us.
    own, forward = vars(module), module.forward
    previous = own.get("forward")

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        return run(forward, args, kwargs)

    def undo() -> None:
        if previous is None:
            own.pop("forward", None)
        else:
            own["forward"] = previous

    own["forward"] = called
    return undo
