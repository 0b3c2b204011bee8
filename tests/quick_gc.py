"""A fixture for test files that collect garbage before every test: import it, and that takes little time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_gc() -> Iterator[None]:
    """Leave what the imports made out of collections while the file's tests run."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
