"""Read the lines of a batch: prompts as text, or with arguments of their own as JSONL or CSV."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TEXTS = ("prompt", "negative_prompt")
_INSTEAD = {"negative": "negative_prompt"}
_MOST_BYTES = 2**30
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Line:
    """A line by its number, from 1 on: its prompt and arguments by name, or what is wrong with it."""

    number: int
    given: dict[str, Any] = field(default_factory=dict)
    wrong: str = ""


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file that say something. FileNotFoundError or ValueError for what is no such file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Name one with a prompt a line (.txt, .jsonl or .csv).")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} has more than 1 GB, which no list of prompts has. Split it.")
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ValueError(f"{path} is UTF-16, as Windows PowerShell writes it. Save it as UTF-8.")
    if path.suffix.lower() == ".csv":
        return list(_of_csv(path, content))
    parse = _of_json if path.suffix.lower() in (".jsonl", ".ndjson") else _of_text
    lines = []
    for number, raw in enumerate(content.splitlines(), 1):
        try:
            if text := raw.decode("utf-8").strip():
                lines.append(Line(number, _checked(parse(text))))
        except UnicodeDecodeError:
            lines.append(Line(number, wrong="it is not UTF-8. Save the file as UTF-8."))
        except ValueError as error:
            lines.append(Line(number, wrong=str(error)))
    return lines


def _of_text(text: str) -> dict[str, Any]:
    return {"prompt": text}


def _of_json(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'it is not JSON ({error}). Write an object, such as {{"prompt": "a boat"}}.') from error
    if not isinstance(given, dict):
        raise ValueError(f'it holds {type(given).__name__}, no object. Write one, such as {{"prompt": "a boat"}}.')
    return given


def _of_csv(path: Path, content: bytes) -> Iterator[Line]:
    try:
        rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""))
        names = [name.strip() for name in next(rows, [])]
        if "prompt" not in names:
            raise ValueError(f"{path} has no column prompt. Name the columns in its first line.")
        if twice := sorted({name for name in names if name and names.count(name) > 1}):
            raise ValueError(f"{path} has more than one column {', '.join(twice)}. Name each column once.")
        for row in rows:
            if not any(row):
                continue
            if len(row) > len(names):
                yield Line(rows.line_num, wrong=f"it has {len(row)} cells for {len(names)} columns. Quote commas.")
                continue
            if any(cell.strip() for name, cell in zip(names, row, strict=False) if not name):
                yield Line(rows.line_num, wrong="it has a cell in a column without a name. Name it in the first line.")
                continue
            given = {name: _value(name, cell) for name, cell in zip(names, row, strict=False) if cell.strip()}
            try:
                yield Line(rows.line_num, _checked(given))
            except ValueError as error:
                yield Line(rows.line_num, wrong=str(error))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV in UTF-8 ({error}).") from error


def _value(name: str, cell: str) -> Any:
    """Return a number or the like where a cell is one, else its text."""
    if name in (*_TEXTS, *_INSTEAD):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    given = {_INSTEAD.get(name, name): value for name, value in given.items() if value is not None}
    if not isinstance(given.get("prompt"), str) or not given["prompt"].strip():
        raise ValueError("it has no prompt. Give one.")
    if not isinstance(given.get("negative_prompt", ""), str):
        raise ValueError("its negative_prompt is no text.")
    for name in _TEXTS:
        if _NO_TEXT.search(given.get(name, "")):
            raise ValueError(f"its {name} has characters that no text has: zeros, or halves of others. Remove them.")
    return given
