"""`ballast plan --table`: plans the published models for common PCs, and writes the page with all of them.

It runs in a checkout: `bench` writes the folders to plan, which hold headers and no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..memory.rates import ASSUMED
from ..pipelines import open_pipeline
from ..pipelines.planning.forecasts import quietly
from .planned_models import (
    COMPUTERS,
    GIB,
    Computer,
    Figures,
    Form,
    PublishedModel,
    figures_of,
    fill_page,
    load_models,
    load_rows,
    rounded,
    save_rows,
)

if TYPE_CHECKING:
    from ..pipelines import Pipeline

PAGES = ("docs/will-it-run.md", "docs/zh/will-it-run.md")
_CHARACTERS = 4  # of a token, about as many as real tokenizers make of English
_ROOT = Path(__file__).resolve().parents[1]


def write(names: Sequence[str]) -> None:
    """Plan the named models, or all, and write their figures and the pages. Raises ValueError for an unknown name."""
    models = load_models()
    known = {model.name for model in models}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"--table knows no {', '.join(unknown)}. It knows {', '.join(sorted(known))}.")
    rows = dict(load_rows())
    for model in models:
        if not names or model.name in names:
            rows[model.name] = plan_model(model)
            save_rows({each.name: rows[each.name] for each in models if each.name in rows})  # a stop loses one model
            print(f"planned {model.name}", flush=True)
    rewrite()


def rewrite() -> None:
    """Write the rows of the pages anew from the figures. Raises ValueError for models that have none yet."""
    models, rows = load_models(), load_rows()
    if lacking := [model.name for model in models if model.name not in rows]:
        raise ValueError(f"there are no figures of {', '.join(lacking)}. Plan them too: ballast plan --table.")
    for page in PAGES:
        path = _ROOT / page
        path.write_text(fill_page(path.read_text("utf-8"), models, rows), encoding="utf-8")


def plan_model(
    model: PublishedModel, forms: Sequence[str] = (), computers: Sequence[Computer] = COMPUTERS
) -> dict[str, Form]:
    """Return the figures of a model in some forms, by default all of its own, on some PCs.

    Raises RuntimeError for an install without the benchmarks.
    """
    try:
        from ..bench.downloads import full_size, published_folders, stored_forms
    except ImportError as error:
        raise RuntimeError("--table needs bench. Clone the repository and run it from there.") from error
    found = {}
    with tempfile.TemporaryDirectory(prefix="ballast-table-") as work, quietly():
        for form in forms or model.forms:
            folder = Path(work) / form
            if model.facts:
                published_folders.build(model.facts, folder, model.transformer, _CHARACTERS)
            else:
                full_size.build(model.folder, folder, **model.options)
            stored_forms.store(folder, form)
            given = published_folders.opening(model.facts, folder) if model.facts else {"path": folder}
            pipe = open_pipeline(**given, device="cpu", cache_dir=Path(work) / "cache", **model.options)
            planned = {on.key: _figures(pipe, model, on) for on in computers}
            figures = {key: figures for key, figures in planned.items() if figures}
            found[form] = Form(rounded(stored_forms.download_bytes(folder) / GIB), figures)
    return found


def _figures(pipe: Pipeline, model: PublishedModel, on: Computer) -> Figures | None:
    asked = {**model.run, **_pictures(model)}
    return figures_of(pipe.plan(**asked, vram=on.vram_bytes, ram=on.ram_bytes, rates=ASSUMED))


def _pictures(model: PublishedModel) -> dict[str, Any]:
    """Return black pictures of the size of the run, for what the model starts from."""
    size = model.run["height"], model.run["width"]
    kinds = {"mask": torch.zeros(size), "images": [torch.zeros(*size, 3)]}
    return {name: kinds.get(name, torch.zeros(1, *size, 3)) for name in model.pictures}
