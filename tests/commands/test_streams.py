"""A stdout that cannot encode a path or a prompt, as Windows gives it to files and pipes, ends no run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

_COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
from import_pack import import_pack
import_pack()
from ballast.commands.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("command", "encoding"),
    [
        pytest.param("batch", "ascii", marks=pytest.mark.long),
        pytest.param("generate", "cp1252", marks=pytest.mark.soak),
        pytest.param("missing", "ascii", marks=pytest.mark.soak),
    ],
)
def test_characters_that_it_does_not_have_are_escaped(command: str, encoding: str, tmp_path: Path) -> None:
    out, lines = tmp_path / "\u7ea2", tmp_path / "\u63d0\u793a.txt"
    out.mkdir()
    lines.write_text("a red circle \u8239\n", "utf-8")
    given = {
        "generate": ["generate", "--prompt", "\u8239", "--out", str(out / "b.png")],
        "batch": ["batch", str(lines), "--out", str(out)],
        "missing": ["batch", str(out / "\u6ca1\u6709.txt"), "--out", str(out)],
    }[command]
    given += ["--model", "demo", "--device", "cpu", "--steps", "1"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command_line = [sys.executable, "-c", _COMMAND, str(ROOT / "tests" / "support"), *given]
    made = subprocess.run(command_line, cwd=ROOT, capture_output=True, env=environment)
    said = made.stdout.decode(encoding) + made.stderr.decode(encoding)
    if command == "missing":
        assert made.returncode == 1 and r"there is no file" in said and r"\u6ca1\u6709.txt" in said
    else:
        assert made.returncode == 0, said
        assert len(list(out.glob("*.png"))) == 1 and r"\u7ea2" in said
