"""Tables in plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence

# Rich describes a box in eight lines of four characters. All are blank except the third, which underlines the heading.
_BOX = "    \n    \n -  \n    \n    \n    \n    \n    \n"


def format_table(rows: Sequence[Sequence[str]], heading: bool = True) -> str:
    """Return rows of words as text in columns, the first row as an underlined heading unless `heading` is false."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=Box(_BOX, ascii=True), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    table.show_header = heading
    for name in rows[0]:
        table.add_column(name if heading else "", no_wrap=True)
    for row in rows[heading:]:
        table.add_row(*row)
    written = io.StringIO()
    # Wide enough for all words, without colours or markup: the text must not depend on the terminal.
    width = 2 * sum(max(len(row[column]) for row in rows) + 4 for column in range(len(rows[0])))
    console = Console(
        file=written, width=width, color_system=None, force_jupyter=False, markup=False, emoji=False, highlight=False
    )
    console.print(table, crop=False)
    return "\n".join(line.rstrip() for line in written.getvalue().rstrip("\n").split("\n"))
