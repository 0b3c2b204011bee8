"""One picture of a card's results: the engine against its bound, and the peers, of each model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

from .. import charts


def draw(found: Mapping[str, Any]) -> Image.Image:
    """Return the pictures of the sections that have rows, one below the other."""
    parts = list(_parts(found)) or [charts.nothing(f"{found['device']}: nothing was measured")]
    whole = Image.new("RGB", (parts[0].width, sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    return whole


def _parts(found: Mapping[str, Any]) -> Iterator[Image.Image]:
    about = {key: found[key] for key in ("device", "torch")}
    for one in found["sections"].values():
        rows = one.get("rows", [])
        if one["worker"] == "engine":
            streamed = [row for row in rows if row["share"] is not None]
            many = len({row["share"] for row in streamed}) > 1  # of one share there is nothing to see
            for weights in dict.fromkeys(row["weights"] for row in streamed) if many else ():
                own = [row for row in streamed if row["weights"] == weights]
                yield charts.stream({**one, **about, "size": f"{one['size']} {weights}", "rows": own})
        elif one["worker"] == "peers" and "regime" in one and rows:
            ratio = one["regime"]["compute"] * one["regime"]["bandwidth"] / one["weight_bytes"]
            yield charts.peers({**one, **about, "ratio": ratio})
