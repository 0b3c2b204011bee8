"""Tables of plain text."""

from __future__ import annotations

import pytest
from ballast.memory.charts.text_tables import format_table

ROWS = [
    ("stage", "unit", "", "peak VRAM"),
    ("encode", "[bold]te[/]", "-", "1.00 GB"),
    ("", "\u4e2d\u6587", "", ":x: 2"),
]


@pytest.mark.parametrize("terminal", [{}, {"FORCE_COLOR": "1", "COLUMNS": "10"}, {"NO_COLOR": "1", "TERM": "dumb"}])
def test_columns_are_aligned_whatever_the_terminal(terminal: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    assert format_table(ROWS).splitlines() == [
        "stage   unit            peak VRAM",
        "------- ------------ -- ---------",
        "encode  [bold]te[/]  -  1.00 GB",
        "        \u4e2d\u6587            :x: 2",
    ]


def test_a_table_without_a_heading_has_no_line() -> None:
    assert (
        format_table([("ok", "torch", "2.13"), ("MISS", "rich", "")], heading=False) == "ok    torch  2.13\nMISS  rich"
    )


def test_a_long_cell_is_not_wrapped() -> None:
    words = "a very long sentence " * 50
    assert format_table([("a", "why"), ("b", words)]).splitlines()[2] == f"b  {words}".rstrip()
