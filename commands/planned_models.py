"""Published models as planned for common PCs: what `ballast doctor` prints, and the rows of docs/will-it-run.md.

`published_models.json` names the models and a usual run of each; `planned_rows.json` has the figures that
`ballast plan --table` found for them. A figure is rounded to three digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..memory.charts.text_tables import format_table
from ..memory.files import read_json
from ..memory.sizes import format_bytes

if TYPE_CHECKING:
    from ..memory.planning.runplan import RunPlan

GIB = 2**30
FORMS = ("bf16", "fp8", "Q4")  # stored forms, the most exact first
VRAM_GB, RAM_GB = (6, 8, 12, 16, 24), (16, 32, 64)
TAKEN_VRAM_BYTES = 5 * GIB // 4  # by the driver, the desktop and ComfyUI's reserve
TAKEN_RAM_BYTES = 5 * GIB  # by the system and other programs
_SOLD_AS = 1.1  # a card of 24 GB may tell 22.5, a PC of 32 GB 30
_NEAR = 1.02  # times as long is as fast: then the more exact form is taken
_HERE = Path(__file__).parent
_ROWS = _HERE / "planned_rows.json"


@dataclass(frozen=True)
class PublishedModel:
    """A model and a usual run of it.

    `facts` names the configs that come with the pack, `transformer` fields of its config that are others, `folder` one
    that `full_size` builds. `pictures` are the names of pictures that it starts from. `workflow` is a number.
    """

    name: str
    repository: str
    workflow: str
    run: Mapping[str, Any]
    facts: str = ""
    folder: str = ""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    forms: Sequence[str] = FORMS


@dataclass(frozen=True)
class Computer:
    """A PC by what it is sold as."""

    vram_gb: int
    ram_gb: int

    @property
    def key(self) -> str:
        """The name of this PC in the figures, and in the pages."""
        return f"{self.vram_gb}/{self.ram_gb}"

    @property
    def vram_bytes(self) -> int:
        """The part of VRAM that a run may take."""
        return self.vram_gb * GIB - TAKEN_VRAM_BYTES

    @property
    def ram_bytes(self) -> int:
        """The part of RAM that weights may take."""
        return self.ram_gb * GIB - TAKEN_RAM_BYTES


COMPUTERS = tuple(Computer(vram, ram) for vram in VRAM_GB for ram in RAM_GB)


@dataclass(frozen=True)
class Figures:
    """Planned figures of a run: its peak, RAM for weights, and seconds.

    `picture` are the seconds of one more picture or video of the same prompt, `first` those of the first one, which
    reads all files and the prompt.
    """

    peak_gb: float
    ram_gb: float
    step: float
    picture: float
    first: float


@dataclass(frozen=True)
class Form:
    """A model in a stored form: GB to download, and the figures by PC. Where it does not fit there are none."""

    download_gb: float
    figures: Mapping[str, Figures]


Rows = Mapping[str, Mapping[str, Form]]  # by model and form


def figures_of(plan: RunPlan) -> Figures | None:
    """Return the figures of a plan, or None for a run that does not fit."""
    if not plan.fits:
        return None
    steps = sum(stage.steps * stage.step_seconds for stage in plan.stages if stage.name == "sample")
    picture = steps + sum(stage.seconds for stage in plan.stages if stage.name == "decode")
    sizes = plan.peak_vram_bytes / GIB, plan.ram_bytes / GIB
    return Figures(*map(rounded, (*sizes, plan.step_seconds, picture, plan.total_seconds)))


def rounded(value: float) -> float:
    """Return a number to three digits."""
    return float(f"{value:.3g}")


def fastest(forms: Mapping[str, Form], on: Computer) -> str:
    """Return the form that makes a picture fastest, the more exact one of equals; "" where none fits."""
    there = {form: forms[form].figures.get(on.key) for form in FORMS if form in forms}
    fit = {form: figures.picture for form, figures in there.items() if figures}
    return next((form for form, taken in fit.items() if taken <= _NEAR * min(fit.values())), "")


def load_models() -> list[PublishedModel]:
    """Return the models, in the order of the page."""
    return [PublishedModel(**told) for told in json.loads((_HERE / "published_models.json").read_text("utf-8"))]


def load_rows() -> Rows:
    """Return the figures that come with the pack."""
    return {
        name: {
            form: Form(told["download_gb"], {key: Figures(*values) for key, values in told["figures"].items()})
            for form, told in forms.items()
        }
        for name, forms in read_json(_ROWS).items()
    }


def save_rows(rows: Rows) -> None:
    """Write the figures, a line for each model and form."""
    models = []
    for name, forms in rows.items():
        told = (f"    {json.dumps(form)}: {json.dumps(_plain(each))}" for form, each in forms.items())
        models.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(told) + "\n  }")
    _ROWS.write_text("{\n" + ",\n".join(models) + "\n}\n", encoding="utf-8")


def _plain(form: Form) -> dict[str, Any]:
    figures = {key: [*asdict(each).values()] for key, each in form.figures.items()}
    return {"download_gb": form.download_gb, "figures": figures}


def computer_of(vram_bytes: int, ram_bytes: int) -> Computer | None:
    """Return the largest PC of the page that a machine is as good as, or None for a smaller one."""
    vram = [each for each in VRAM_GB if each * GIB <= _SOLD_AS * vram_bytes]
    ram = [each for each in RAM_GB if each * GIB <= _SOLD_AS * ram_bytes]
    return Computer(vram[-1], ram[-1]) if vram and ram else None


def summary(on: Computer) -> str:
    """Return a table of the models on a PC, each in its fastest form."""
    heading = ("model", "weights", "a picture or video", "a step", "peak VRAM", "RAM", "download")
    return format_table([heading, *_summary_rows(on)])


def _summary_rows(on: Computer) -> Iterator[tuple[str, ...]]:
    for name, forms in load_rows().items():
        if not (best := fastest(forms, on)):
            yield (name, "-", "does not fit", "", "", "", "")
            continue
        of = forms[best].figures[on.key]
        times = duration(of.picture), duration(of.step)
        yield (name, best, *times, _size(of.peak_gb), _size(of.ram_gb), _size(forms[best].download_gb))


def fill_page(text: str, models: Sequence[PublishedModel], rows: Rows) -> str:
    """Return a page with the rows of its tables made anew. `<!-- rows: 8/32 -->` stands before the table of a PC."""

    def table(match: re.Match[str]) -> str:
        on = next(each for each in COMPUTERS if each.key == match[2])
        return match[1] + "".join(f"| {' | '.join(_cells(model, rows[model.name], on))} |\n" for model in models)

    return re.sub(r"(<!-- rows: (\S+) -->\n\n\|.*\n\|[ :|-]+\n)(?:\|.*\n)*", table, text)


def _cells(model: PublishedModel, forms: Mapping[str, Form], on: Computer) -> Iterator[str]:
    yield f"[{model.name}](https://huggingface.co/{quote(model.repository)})"
    best = fastest(forms, on)
    for form in FORMS:
        found = forms[form].figures.get(on.key) if form in forms else None
        word = duration(found.picture) if found else "-"
        yield f"**{word}**" if form == best else word
    if not best:
        yield from ["-"] * 5
    else:
        of = forms[best].figures[on.key]
        yield from (duration(of.first), duration(of.step))
        yield from (_size(of.peak_gb), _size(of.ram_gb), _size(forms[best].download_gb))
    yield model.workflow


def duration(seconds: float) -> str:
    """Return a time to two or three digits: "0.41 s", "52 s", "12 min", "3.1 h"."""
    units = (("s", 1, 90), ("min", 60, 5400), ("h", 3600, float("inf")))
    unit, value = next((unit, seconds / length) for unit, length, most in units if seconds < most)
    return f"{value:.{2 if value < 1 else 1 if value < 9.95 else 0}f} {unit}"


def _size(gigabytes: float) -> str:
    return format_bytes(round(gigabytes * GIB))
