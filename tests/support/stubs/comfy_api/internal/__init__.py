"""How the host calls into a node class: on a clone that cannot be written to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class _ComfyNodeInternal:
    """Base of every node class."""


class _NodeOutputInternal:
    """Base of every node output."""


def first_real_override(cls: type, name: str, *, base: type | None = None) -> Callable | None:
    """The method `name` as bound to `cls`, or None if only the node base class defines it."""
    base = cls.GET_BASE_CLASS() if base is None else base
    for parent in cls.__mro__:
        if parent is base:
            return None
        if name in vars(parent):
            return getattr(cls, name)
    return None


def lock_class(cls: type) -> type:
    def refuse(self: Any, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: '{name}' cannot be set")

    class Locked(type(cls)):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(f"Cannot modify class attribute '{name}' on locked class '{self.__name__}'")

    return Locked(cls.__name__, (cls,), {"__setattr__": refuse, "__module__": cls.__module__})


def make_locked_method_func(type_obj: type, func: str, class_clone: type) -> Callable[..., Any]:
    locked = lock_class(class_clone)
    method = getattr(type_obj, func).__func__
    if inspect.iscoroutinefunction(method):

        async def call_async(**inputs: Any) -> Any:
            return await method(locked, **inputs)

        return call_async

    def call(**inputs: Any) -> Any:
        return method(locked, **inputs)

    return call
