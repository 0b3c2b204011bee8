"""The sound of videos: in the film, in a .wav beside other files, or alone."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import ballast
import numpy as np
import pytest
import torch
from ballast.commands import sounds
from ballast.commands.images import save_images
from ballast.commands.main import main
from ballast.commands.results import Result
from ballast.pipelines.stock.sound import Sound
from modular import newest

RATE = 16000


def tones(seconds: float = 0.5) -> Sound:
    """Two sounds of two channels, each of another pitch."""
    at = torch.arange(int(seconds * RATE)) / RATE
    waves = [0.5 * torch.sin(6.283 * pitch * at) for pitch in (220.0, 440.0, 880.0, 1760.0)]
    return Sound(torch.stack(waves).unflatten(0, (2, 2)), RATE)


def read_wav(path: Path) -> torch.Tensor:
    """The sound [C,T] of a .wav."""
    with wave.open(str(path)) as file:
        assert file.getframerate() == RATE and file.getsampwidth() == 2
        raw = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
    return torch.from_numpy(raw.T.astype(np.float32)) / (2**15 - 1)


def test_a_film_has_its_sound(tmp_path: Path) -> None:
    """AAC loses a little: the pitch of each channel stays."""
    av = pytest.importorskip("av")
    sound = tones()
    written = save_images(torch.rand(2, 12, 32, 48, 3), tmp_path / "film.mp4", 24, sound)
    assert [path.name for path in written] == ["film.mp4", "film-1.mp4"]
    for number, path in enumerate(written):
        with av.open(str(path)) as film:
            assert len(list(film.decode(video=0))) == 12
        with av.open(str(path)) as film:
            heard = np.concatenate([frame.to_ndarray() for frame in film.decode(audio=0)], axis=1)
        assert heard.shape[0] == 2 and abs(heard.shape[1] - 8000) <= 2048
        for channel, made in zip(heard, sound.waveform[number], strict=True):
            loudest = np.abs(np.fft.rfft(channel[:8000])).argmax()
            assert abs(loudest - np.abs(np.fft.rfft(made.numpy())).argmax()) <= 2


def test_other_files_have_it_beside_them(tmp_path: Path) -> None:
    sound = tones()
    written = save_images(torch.rand(1, 2, 8, 8, 3), tmp_path / "film.webp", 24, sound)
    assert [path.name for path in written] == ["film.webp", "film.wav"]
    torch.testing.assert_close(read_wav(written[1]), sound.waveform[0], atol=1e-4, rtol=0)
    result = Result(tmp_path, ".gif", {"prompt": "a boat", "seed": 0}, 2)
    result.write(torch.rand(2, 2, 8, 8, 3), 24, sound)
    for number, path in enumerate(result.paths):
        torch.testing.assert_close(read_wav(path.with_suffix(".wav")), sound.waveform[number], atol=1e-4, rtol=0)


def test_a_wav_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.wav").mkdir()
    with pytest.raises(OSError, match=r"one\.wav cannot be written") as refused:
        sounds.write_wav(sounds.part_of(tones(), 0), tmp_path / "one.wav")
    assert "\n" not in str(refused.value)


@pytest.mark.long
def test_generate_writes_film_and_sound(tmp_path: Path, capsys: Any) -> None:
    """Those of the library; a file of latents keeps the sound, and one of ComfyUI's says that it does not."""
    pytest.importorskip("av")
    folder = newest.ltx2_class(tmp_path / "ltx2")
    run = ["generate", "--model", str(folder), "--device", "cpu"]
    size = ["--prompt", "a boat", "--steps", "2", "--width", "64", "--height", "32", "--frames", "9"]
    assert main([*run, *size, "--out", str(tmp_path / "one.wav")]) == 0
    pipe = ballast.open_pipeline(folder, device="cpu")
    latents = pipe.sample(pipe.encode("a boat"), steps=2, width=64, height=32, frames=9)
    sound = pipe.decode_sound(latents)
    torch.testing.assert_close(read_wav(tmp_path / "one.wav"), sound.waveform[0], atol=1e-4, rtol=0)
    for noted, name in ((latents, "all.latent"), (latents.clone(), "pictures.latent")):
        ballast.pipelines.decoding.rescue.save_latents(noted, tmp_path / name)
        out = tmp_path / f"{name}.gif"
        capsys.readouterr()
        assert main([*run, "--latent", str(tmp_path / name), "--out", str(out)]) == 0
        assert out.with_suffix(".wav").is_file() == (noted is latents)
        assert ("the latents have no sound" in capsys.readouterr().out) == (noted is not latents)
