"""Prompts that a class has its own call encode: recorded, and answered again while it samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.pipelines.encoding.conditioning import Conditioning
from ballast.pipelines.stock.recording import RECORD, Recording
from pipeline_classes import odd_pipelines


class Encoder:
    """Stands for a pipeline: encodes a prompt by two methods."""

    def __init__(self) -> None:
        self.runs = 0

    def encode_prompt(
        self, prompt: str, guidance_scale: float = 1.0, device: object = None, images: object = None
    ) -> tuple[torch.Tensor, list[torch.Tensor], None, int]:
        self.runs += 1
        tensor = torch.full((2,), float(len(prompt)))
        return tensor, [tensor + 1, tensor + 2], None, 7

    def encode_prompt_again(self, prompt: str) -> torch.Tensor:
        self.runs += 1
        return torch.zeros(1)


def recorded(*asked: tuple[Any, ...]) -> Conditioning:
    recording, pipe = Recording(), Encoder()
    recording.listen(pipe)
    for each in asked:
        pipe.encode_prompt(*each)
    return Conditioning.of(recording.tensors(1, prompt="a"))


def test_what_was_answered_is_answered_again(tmp_path: Path) -> None:
    """From a file too, and with equal tensors that nobody else has."""
    recorded(("a boat", 3.0)).save(tmp_path / "cond.safetensors")
    cond = Conditioning.load(tmp_path / "cond.safetensors")
    recording, texts = Recording.of(cond, torch.device("cpu"))
    pipe = Encoder()
    recording.replay(pipe)
    for _ in range(2):
        tensor, pair, none, number = pipe.encode_prompt("a boat", guidance_scale=9.0, device="elsewhere")
        assert (tensor.tolist(), [one.tolist() for one in pair]) == ([6, 6], [[7, 7], [8, 8]])
        assert (none, number) == (None, 7)
        tensor.zero_()
    assert texts == {"prompt": "a"} and pipe.runs == 0 and "prompts" in cond.info


@pytest.mark.parametrize(
    "asked", [("a boat",), ("a ship", 3.0), ("a boat", 3.0, None, torch.zeros(1)), ("a boat", 3.0, None, "other")]
)
def test_another_question_has_no_answer(asked: tuple[Any, ...]) -> None:
    recording, _ = Recording.of(recorded(("a boat", 3.0), ("a boat", 3.0, None, torch.ones(1))), torch.device("cpu"))
    pipe = Encoder()
    recording.replay(pipe)
    with pytest.raises(RuntimeError, match="encodes its prompt while it samples in another way"):
        pipe.encode_prompt(*asked)
    with pytest.raises(RuntimeError, match="in another way"):
        pipe.encode_prompt_again("a boat")


def test_the_same_question_is_asked_once() -> None:
    recording, pipe = Recording(), Encoder()
    recording.listen(pipe)
    for scale in (3.0, 5.0):
        pipe.encode_prompt("a boat", scale)
    assert pipe.runs == 1 and recording.asked == 2


@pytest.mark.parametrize(("images", "sees"), [(None, False), (torch.zeros(1), True)])
def test_pictures_in_a_question_are_seen(images: torch.Tensor | None, sees: bool) -> None:
    recording, pipe = Recording(), Encoder()
    recording.listen(pipe)
    pipe.encode_prompt("a boat", images=images)
    assert recording.sees is sees


def test_what_has_no_digest_is_refused() -> None:
    pipe = Encoder()
    Recording().listen(pipe)
    with pytest.raises(TypeError, match="encoded with object, of which no digest is known"):
        pipe.encode_prompt("a boat", images=object())


def test_a_conditioning_of_another_class_is_refused(tmp_path: Path) -> None:
    pipe = ballast.open_pipeline(odd_pipelines.save("hunyuandit", tmp_path / "hunyuandit"), device="cpu")
    cond = pipe.encode("a cat")
    assert pipe.model.replays and pipe.sampling_notes(cond, 4.0) == []
    assert json.loads(cond.info[RECORD])["texts"] == {"prompt": "a cat"}
    with pytest.raises(ValueError, match="made by another class. Encode the prompt with this pipeline"):
        pipe.sample(Conditioning(cond.tensors), steps=1, width=32, height=32)
    both = pipe.encode(["a cat", "two dogs"])
    drawn = [pipe.sample(each, steps=1, width=32, height=32, use_resolution_binning=False) for each in (cond, both)]
    assert [len(each) for each in drawn] == [1, 2]
    torch.testing.assert_close(drawn[1][:1], drawn[0])
