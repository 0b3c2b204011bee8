"""The streams of a process, whatever characters their encoding has."""

from __future__ import annotations

import io
import sys


def escape_unprintable() -> None:
    """Make stdout and stderr escape characters that they cannot encode, such as a Chinese path in cp1252.

    Windows gives files and pipes such an encoding, and one character more would end a run whose pictures are written.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
