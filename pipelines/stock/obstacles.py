"""Why a pipeline class cannot run in stages, where its own code says so: in words for its user."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from .signatures import encoding_of, tree_of

_SIZES = ("height", "width", "grid_h", "grid_w")


def obstacle(cls: Any) -> str:
    """Return what of a class that was refused stands against stages; empty where its code has none of these."""
    call, whole = tree_of(cls.__call__), tree_of(cls)
    if any(_calls(loop, "step") and _calls(loop, "decode", "decode_latents") for loop in _loops(call)):
        return "it draws a video in sections and decodes each while it samples, and stages decode once, at the end"
    if _calls(tree_of(cls.__init__), "from_transformer"):
        return "its ControlNet calls parts of its transformer, and the weights of one model move alone"
    if writing := _calls(whole, "generate"):
        name = getattr(getattr(writing[0].func, "value", None), "attr", "language model")
        return f"its {name} writes tokens one by one before it samples, which takes real weights to compare"
    encode = encoding_of(cls)
    if encode is not None and any(name in inspect.signature(encode).parameters for name in _SIZES):
        return "it encodes its prompt for one size of picture, which is not known when prompts are encoded"
    return ""


def _loops(tree: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.For)]


def _calls(tree: ast.AST, *names: str) -> list[ast.Call]:
    """Return the calls of methods or functions of these names."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in names]
