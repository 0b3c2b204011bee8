"""Where the figures of this project lie, and the model that comes with it."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
DEMO = Path(__file__).resolve().parents[1] / "demo" / "shapes"
