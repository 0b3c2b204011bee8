"""`ballast bench codecs`: every codec has a row, and a device that decodes to other bits is told."""

from __future__ import annotations

import json
from pathlib import Path

import ballast.commands.main
import pytest
import torch
from ballast.memory.codecs.gguf import TYPES
from ballast.memory.codecs.int8 import Int8


def arguments(out: Path, *more: str) -> list[str]:
    return ["bench", "codecs", "--device", "cpu", "--megaweights", "0.05", "--rounds", "2", "--out", str(out), *more]


def test_every_codec_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert ballast.commands.main.main(arguments(tmp_path)) == 0
    found = json.loads((tmp_path / "codecs.json").read_text("utf-8"))
    rows = {row["name"]: row for row in found["rows"]}
    assert rows.keys() == {
        "raw", "exact12", "exact12, two threads", "int8", "fp8", "int8 convrot", "mxfp8", "nvfp4",
        *(kind.name for kind in TYPES.values() if kind.decode),
    }  # fmt: skip
    assert 12 < rows["exact12"]["bits"] < 12.1 and rows["Q4_K"]["bits"] == 4.5 and rows["raw"]["bits"] == 16
    assert rows["raw"]["counted"] >= 0.99 * rows["raw"]["seconds"], "by which the others are counted"
    assert all(row["seconds"] > 0 and row["counted"] > 0 for row in rows.values())
    assert [name for name, row in rows.items() if row["encoded_gbps"]] == [
        "exact12", "exact12, two threads", "int8", "fp8",
    ]  # fmt: skip
    assert "same bits" in capsys.readouterr().out


def test_other_bits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    decode, calls = Int8._decode, []

    def wrong(self: Int8, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        decode(self, parts, out)
        calls.append(out)
        out[-1] += len(calls)  # another at each call

    monkeypatch.setattr(Int8, "_decode", wrong)
    assert ballast.commands.main.main(arguments(tmp_path)) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "OTHER BITS" in line] == ["int8"]


@pytest.mark.parametrize("more", [("--megaweights", "0"), ("--megaweights", "-1"), ("--rounds", "0")])
def test_no_number_is_refused_in_one_line(more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert ballast.commands.main.main(arguments(tmp_path, *more)) == 1
    assert "both take a number above 0" in capsys.readouterr().err and not list(tmp_path.iterdir())
