"""The page that tells of every pipeline class of diffusers: its parts that come from the table of verdicts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any


def parts(table: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What stands between the marks of each verdict, in whatever language the page is."""
    names = {word: [name for name, entry in table.items() if entry["verdict"] == word] for word in
             ("equal", "refused", "not text", "not built")}  # fmt: skip
    made = {word: _block(found) for word, found in names.items() if word != "refused"}
    rows = [f"| `{name}` | `{_reason(name, table[name]['reason'])}` |" for name in names["refused"]]
    return made | {"refused": "\n".join(rows)}


def filled(page: str, table: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with its parts as the table has them."""
    for word, part in parts(table).items():
        mark = word.replace(" ", "-")
        between = re.compile(rf"(<!-- {mark} -->\n(?:\|.*\n\|[ :|-]+\n)?).*?(<!-- end -->)", re.DOTALL)
        page, count = between.subn(lambda found, part=part: found[1] + part + "\n" + found[2], page)  # type: ignore[misc]
        assert count == 1, f"the page has no part for {word!r}"
    return page


def _block(names: list[str]) -> str:
    return "\n".join(["```text", *textwrap.wrap(", ".join(names), 118), "```"])


def _reason(name: str, reason: str) -> str:
    """Without what every one of them says, and without what a table would take for its own."""
    short = reason.removeprefix(f"{name} ").removeprefix("cannot be staged: ")
    short = short.replace("Run it with diffusers itself.", "").replace("and cannot be staged yet.", "")
    return short.replace("|", "/").replace("`", "'").strip().rstrip(",. ")
