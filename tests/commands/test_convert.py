"""`ballast convert`: a file of a model's weights in 12 or 8 bits, which runs as `weights` of the pipeline does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.commands.main import main
from places import ROOT
from safetensors.torch import load_file
from selection import few

SIZE: dict[str, Any] = {"width": 64, "height": 64, "steps": 1, "guidance": 2.0}
DEMO = ROOT / "demo" / "shapes"


def converted(to: str, out: Path, *more: str, model: Path = DEMO) -> int:
    return main(["convert", str(model), str(out), "--to", to, "--dtype", "bf16", *more])


@pytest.mark.parametrize("weights", few(["exact12", "int8", "fp8"], "int8"))
def test_the_file_runs_as_the_choice_of_weights_does(
    weights: str, tmp_path: Path, sim: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"device": "sim", "dtype": "bf16"}
    assert converted(weights, file := tmp_path / "model.safetensors") == 0
    said = capsys.readouterr()
    before, _, rest = said.err.partition(f"converting transformer to {weights}: 1.88 MB to about ")
    assert before.startswith("opening ") and "convert: " in rest, "the size is told before the bar"
    assert said.out.startswith(f"wrote {file}, 1.")
    assert len(load_file(file)) > 100, "an ordinary safetensors file"
    of_file = ballast.open_pipeline(file, base=DEMO, **given)
    of_choice = ballast.open_pipeline(DEMO, weights=weights, **given)
    cond = of_choice.encode("a red circle")
    assert torch.equal(of_file.sample(cond, **SIZE), of_choice.sample(cond, **SIZE))
    assert of_file.denoisers[0].size_bytes == of_choice.denoisers[0].size_bytes
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_converted_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert converted("int8", quantized := tmp_path / "a.safetensors", "--part", "text_encoder") == 0
    wrong = {
        "Use a name that ends in .safetensors.": lambda: converted("int8", folder / "a.gguf"),
        "Name a file elsewhere.": lambda: converted("int8", DEMO / "transformer" / "a.safetensors"),
        "It has text_encoder, transformer.": lambda: converted("int8", folder / "a.safetensors", "--part", "vae"),
        "is quantized already: ": lambda: converted(
            "fp8", folder / "a.safetensors", "--base", str(DEMO), model=converted_transformer(tmp_path)
        ),
    }
    for words, run in wrong.items():
        capsys.readouterr()
        assert run() == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("ballast: ") and words in line
    assert quantized.exists() and not list(folder.glob("*"))
    assert not list((DEMO / "transformer").glob("a.*"))


def converted_transformer(folder: Path) -> Path:
    assert converted("int8", file := folder / "transformer.safetensors") == 0
    return file
