"""Run blocks of a modular pipeline one after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def run_blocks(blocks: Sequence[Any], pipe: Any, state: Any) -> None:
    """Run blocks on a pipeline's components, as a sequence of them does."""
    with _untold(), torch.no_grad():
        for block in blocks:
            block(pipe, state)


@contextmanager
def _untold() -> Iterator[None]:
    """Silence the tracebacks that blocks log of each error within them, such as that of memory that runs out."""
    logger = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
