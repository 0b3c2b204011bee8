"""Which pipeline classes diffusers has, and which classes of its tests build each of them tiny."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest

Testers = dict[str, list[Any]]
"""The test classes that build a pipeline class, by its name."""


def public_classes() -> dict[str, Any]:
    """The pipeline classes that diffusers exports, by name."""
    found = {}
    for name in sorted(dir(diffusers)):
        value = getattr(diffusers, name, None)
        if inspect.isclass(value) and issubclass(value, diffusers.DiffusionPipeline) and value.__name__ == name:
            found[name] = value
    found.pop("DiffusionPipeline", None)
    return found


def public(cls: Any) -> Any:
    """The class of diffusers itself that a pipeline is of."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("diffusers."))


def find_testers(checkout: Path) -> tuple[Testers, list[str]]:
    """The test classes of a checkout of diffusers; and modules that cannot be imported, and why."""
    sys.path.insert(0, str(checkout))
    found: Testers = {}
    failed = []
    for file in sorted((checkout / "tests" / "pipelines").rglob("test_*.py")):
        module_name = ".".join(file.relative_to(checkout).with_suffix("").parts)
        try:
            with mock.patch.object(pytest.mark, "_config", None):  # their marks are not known here
                module = importlib.import_module(module_name)
        except Exception as error:
            failed.append(f"{module_name}: {type(error).__name__}: {error}")
            continue
        for value in vars(module).values():
            if not (inspect.isclass(value) and value.__module__ == module_name):
                continue
            pipeline = inspect.getattr_static(value, "pipeline_class", None)
            if (
                inspect.isclass(pipeline)
                and issubclass(pipeline, diffusers.DiffusionPipeline)
                and hasattr(value, "get_dummy_components")
            ):
                found.setdefault(public(pipeline).__name__, []).append(value)
    return found, failed
