"""Something done before and after each call of a module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def around_each_call(
    module: nn.Module, before: Callable[[bool], None], after: Callable[[bool], None]
) -> Callable[[], None]:
    """Call `before(first)` and `after(failed)` around each call of a module, whether it returns or raises.

    Returns what undoes it. Not by torch's forward hooks: while a module has any, torch's own frames hold on to the
    inputs for as long as somebody holds an error that came out of the call.
    """
    own, forward = vars(module), module.forward
    previous = own.get("forward")
    first = True

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        was_first, first = first, False
        before(was_first)
        failed = True
        try:
            result = forward(*args, **kwargs)
            failed = False
            return result
        finally:
            after(failed)

    def undo() -> None:
        if previous is None:
            own.pop("forward", None)
        else:
            own["forward"] = previous

    own["forward"] = called
    return undo
