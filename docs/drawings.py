"""Draw the pictures of docs/how-it-works.md, and the registry's icon and banner, into docs/pictures.

Run it as `python docs/drawings.py`.

The figures of `STAGES` are those of `ballast plan` for HiDream-I1 Fast, 1024 x 1024, 8 GB of VRAM and 64 GB of RAM;
`tests/pipelines/families/test_hidream_plans.py` compares them with a plan. Slots of the ring come from
`ballast.memory.planning.ring_offsets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.memory.planning.ring_offsets import offsets
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

FOLDER = Path(__file__).parent / "pictures"
INK, MUTED, GRID, LIGHT = "#1f2937", "#6b7280", "#e5e7eb", "#cbd5e1"
BLUE, ORANGE, GREEN, RED, AMBER = "#2563eb", "#ea580c", "#16a34a", "#dc2626", "#fdba74"
BUDGET = 8.0

# Name, GB of all weights, GB of weights on the device, GB of peak, colour, width of the column.
STAGES = {
    "encode": [
        ("CLIP-L", 0.23, 0.16, 0.17, BLUE, 1.0),
        ("CLIP-G", 1.29, 1.18, 1.19, BLUE, 1.0),
        ("T5", 8.87, 7.97, 7.99, BLUE, 1.0),
        ("Llama 8B", 14.0, 7.95, 8.00, BLUE, 1.0),
    ],
    "sample": [("transformer, 17B", 31.9, 7.02, 7.49, ORANGE, 3.2)],
    "decode": [("VAE", 0.31, 0.31, 3.31, GREEN, 1.0)],
}


def draw_stages() -> Figure:
    """Draw each model's full size, and what of it is on the device, below the line of the budget."""
    figure = Figure(figsize=(11, 5.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for stage, models in STAGES.items():
        begin = left
        for name, whole, held, peak, colour, width in models:
            axes.add_patch(Rectangle((left, 0), width, held, color=colour, lw=0))
            axes.add_patch(Rectangle((left, held), width, peak - held, color=LIGHT, lw=0))
            if whole > peak:
                axes.add_patch(Rectangle((left, 0), width, whole, fill=False, ec=MUTED, ls=(0, (4, 3)), lw=1.2))
            axes.text(
                left + width / 2,
                max(whole, peak) + 0.5,
                f"{name}\n{whole:.2f} GB" if whole < 10 else f"{name}\n{whole:.1f} GB",
                ha="center",
                color=INK,
            )
            left += width + 0.25
        axes.text((begin + left - 0.25) / 2, -1.9, stage, ha="center", fontsize=13, color=INK, weight="bold")
        left += 0.75
    end = left - 1
    axes.axhline(BUDGET, color=RED, ls="--", lw=1.4)
    axes.text(end + 2.1, BUDGET + 0.35, "your budget: 8 GB of VRAM", color=RED, ha="right")
    axes.text(7.5, 20, "stays in RAM, passes through\nthe card in each step", ha="center", color=MUTED)
    axes.text(7.5, 3.5, "on the card", ha="center", color="white", weight="bold")
    axes.set_title(
        "HiDream-I1 Fast: 56.6 GB of weights in 8 GB of VRAM, 1.30 s a step (planned)", loc="left", color=INK, pad=14
    )
    axes.set_xlim(-0.3, end + 2.2)
    axes.set_ylim(0, 36)
    _plain(axes)
    axes.set_xticks([])
    axes.set_yticks([0, 8, 16, 24, 32], ["0", "8 GB", "16 GB", "24 GB", "32 GB"], color=MUTED)
    axes.grid(axis="y", color=GRID)
    axes.legend(
        handles=[
            Rectangle((0, 0), 1, 1, color=BLUE, label="text encoders"),
            Rectangle((0, 0), 1, 1, color=ORANGE, label="transformer"),
            Rectangle((0, 0), 1, 1, color=GREEN, label="VAE"),
            Rectangle((0, 0), 1, 1, color=LIGHT, label="activations"),
            Rectangle((0, 0), 1, 1, fill=False, ec=MUTED, ls=(0, (4, 3)), label="all weights of the model"),
        ],
        loc="upper left",
        frameon=False,
        labelcolor=INK,
    )
    return figure


GROUPS = 8  # weight groups of the example, one unit of time each
STREAMED = (1, 3, 5, 7)
SLOTS = (40, 40, 40, 40)  # MB of the streamed groups
RING = 80  # MB
COPY = 1.7  # units of time that a copy takes


@dataclass
class Pass:
    """One group's stay in the ring: its copy, its call, and the end of its stay."""

    group: int
    slot: int  # first MB of its slot
    copy: float
    call: float
    end: float = float("inf")


def passes(steps: int) -> list[Pass]:
    """Schedule copies as the engine does: one after the other, each behind the last use of the bytes it overwrites."""
    begins = dict(zip(STREAMED, offsets(list(SLOTS), RING), strict=True))
    done: list[Pass] = []
    for step in range(steps):
        for group in STREAMED:
            before = [one for one in done if one.slot == begins[group]]
            free = done[-1].copy + COPY if done else -2 * COPY
            used = before[-1].call + 1 if before else -2 * COPY
            done.append(Pass(group, begins[group], max(free, used), step * GROUPS + group))
            if before:
                before[-1].end = done[-1].copy
    return done


def draw_ring() -> Figure:
    """Draw a Layout of eight groups, the two streams of the device, and the bytes of the ring over time."""
    figure = Figure(figsize=(11, 6.4), dpi=110, layout="constrained")
    place, streams, ring = figure.subplots(3, 1, height_ratios=[1.25, 1.6, 1.9])
    _draw_layout(place)
    _draw_streams(streams)
    _draw_bytes(ring)
    return figure


def _draw_layout(axes: Any) -> None:
    axes.set_title("Layout: which weight groups stay, which stream", loc="left", color=INK, fontsize=12)
    for group in range(GROUPS):
        streamed = group in STREAMED
        _box(axes, group * 1.1, 0.55, 1, 0.9, AMBER if streamed else ORANGE, f"group {group}", dark=streamed)
    axes.text(GROUPS * 1.1 + 0.1, 1.0, "call order of one step", va="center", color=MUTED)
    axes.text(0, 0.05, "dark: resident, in VRAM all the time", color=ORANGE, va="center")
    axes.text(4.4, 0.05, "light: streamed, from RAM or disk through the ring", color="#c2410c", va="center")
    axes.set_xlim(-0.1, 12)
    axes.set_ylim(-0.2, 1.6)
    axes.axis("off")


def _draw_streams(axes: Any) -> None:
    axes.set_title("Two streams of the device: copies run ahead of the calls", loc="left", color=INK, fontsize=12)
    for call in range(16):
        group = call % GROUPS
        _box(axes, call, 1.5, 1, 0.8, AMBER if group in STREAMED else ORANGE, str(group), dark=group in STREAMED)
    for one in passes(3):
        if 0 <= one.copy < 16:
            _box(axes, one.copy, 0, COPY, 0.7, "#93c5fd", f"copy {one.group}", dark=True)
    first = next(one for one in passes(3) if one.copy >= 2)
    small: dict[str, Any] = {"va": "center", "color": RED, "fontsize": 9}
    arrow = {"arrowstyle": "-|>", "color": RED, "lw": 1.6}
    axes.annotate("", (first.copy, 0.7), (first.copy, 1.5), arrowprops=arrow)
    axes.annotate("", (first.call, 1.5), (first.copy + COPY, 0.7), arrowprops=arrow)
    axes.text(first.copy - 0.1, 1.1, "a copy waits for the last use\nof the bytes it overwrites", ha="right", **small)
    axes.text(first.call + 0.25, 1.1, "a call waits for its copy", **small)
    axes.text(-0.2, 1.9, "compute", ha="right", va="center", color=INK)
    axes.text(-0.2, 0.35, "copy", ha="right", va="center", color=INK)
    axes.axvline(GROUPS, color=MUTED, lw=1, ls=":")
    axes.text(GROUPS - 0.1, 2.4, "step 1", ha="right", color=MUTED)
    axes.text(GROUPS + 0.1, 2.4, "step 2", color=MUTED)
    axes.set_xlim(-1.6, 16.2)
    axes.set_ylim(-0.1, 2.7)
    axes.axis("off")


def _draw_bytes(axes: Any) -> None:
    axes.set_title("Ring of 80 MB: what its bytes hold over time", loc="left", color=INK, fontsize=12)
    size = dict(zip(STREAMED, SLOTS, strict=True))
    for one in passes(4):
        begin, end = max(0.0, one.copy), min(16.0, one.end)
        if begin >= 16 or end <= 0:
            continue
        copied = min(16.0, one.copy + COPY)
        height = size[one.group] - 3
        if copied > begin:
            axes.add_patch(
                Rectangle((begin, one.slot), copied - begin, height, fc="#dbeafe", ec="#60a5fa", hatch="///")
            )
        held = max(begin, copied)
        axes.add_patch(Rectangle((held, one.slot), end - held, height, color=AMBER, lw=0))
        if one.call < 16:
            _box(axes, one.call, one.slot, 1, height, ORANGE, str(one.group), dark=False)
    axes.set_xlim(-1.6, 16.2)
    axes.set_ylim(0, RING)
    _plain(axes)
    axes.set_yticks([20, 60], ["0-40 MB", "40-80 MB"], color=MUTED)
    axes.tick_params(axis="y", pad=-68)
    axes.set_xticks([])
    axes.legend(
        handles=[
            Rectangle((0, 0), 1, 1, fc="#dbeafe", ec="#60a5fa", hatch="///", label="being copied"),
            Rectangle((0, 0), 1, 1, color=AMBER, label="waits for its call"),
            Rectangle((0, 0), 1, 1, color=ORANGE, label="runs"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.02),
        ncols=3,
        frameon=False,
        labelcolor=INK,
    )


def _box(axes: Any, left: float, low: float, width: float, height: float, colour: str, text: str, dark: bool) -> None:
    axes.add_patch(Rectangle((left, low), width, height, fc=colour, ec="white", lw=2))
    axes.text(left + width / 2, low + height / 2, text, ha="center", va="center", color=INK if dark else "white")


def _plain(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


# Of the icon and the banner: height of a model, height of what is on the card, colour. The line of the budget is at 1.
COLUMNS = ((1.0, 0.95, BLUE), (1.6, 0.95, BLUE), (2.9, 0.95, ORANGE), (0.55, 0.55, GREEN))


def draw_icon() -> Figure:
    """Draw models that take turns below the line of the budget, 400 pixels square."""
    figure = Figure(figsize=(4, 4), dpi=100, facecolor=INK)
    _draw_columns(figure.add_axes((0.1, 0.1, 0.8, 0.8)), edge=4)
    return figure


def draw_banner() -> Figure:
    """Draw the icon beside the name and what the pack does, 21:9, 1680 pixels wide."""
    figure = Figure(figsize=(16.8, 7.2), dpi=100, facecolor=INK)
    _draw_columns(figure.add_axes((0.06, 0.14, 0.29, 0.72)), edge=4)
    figure.text(0.41, 0.6, "Ballast", color="white", fontsize=84, weight="bold", va="center")
    figure.text(0.413, 0.42, "Image and video models larger than your VRAM,", color=LIGHT, fontsize=25, va="center")
    figure.text(0.413, 0.34, "in ComfyUI, within a budget that you set", color=LIGHT, fontsize=25, va="center")
    return figure


def _draw_columns(axes: Any, edge: float) -> None:
    for column, (whole, held, colour) in enumerate(COLUMNS):
        if whole > held:
            left = Rectangle((column, held), 0.8, whole - held, fill=False, ec=MUTED, ls=(0, (2, 1.5)), lw=edge * 0.6)
            axes.add_patch(left)
        axes.add_patch(Rectangle((column, 0), 0.8, held, color=colour, lw=0))
    axes.plot([-0.2, 4], [1, 1], color=RED, lw=edge)
    axes.set_xlim(-0.25, 4.05)
    axes.set_ylim(-0.05, 3)
    axes.axis("off")


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    drawn = {"stages": draw_stages(), "ring": draw_ring(), "icon": draw_icon(), "banner": draw_banner()}
    for name, figure in drawn.items():
        figure.savefig(FOLDER / f"{name}.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
