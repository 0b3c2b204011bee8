"""Write the sound of videos: into a film, or as a .wav."""

from __future__ import annotations

import wave
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from ..pipelines.stock.sound import Sound

WAV = ".wav"
_FILM = ".mp4"  # which holds its sound itself
_LOUDEST = 2**15 - 1  # of 16 bits


@overload
def part_of(sound: Sound, number: int) -> Sound: ...


@overload
def part_of(sound: Sound | None, number: int) -> Sound | None: ...


def part_of(sound: Sound | None, number: int) -> Sound | None:
    """Return the sound [1,C,T] of one video of several; None without sound."""
    return sound and replace(sound, waveform=sound.waveform[number : number + 1])


def write_beside(sound: Sound | None, path: Path) -> list[Path]:
    """Write the sound of a video into a .wav beside it, where the file at `path` cannot hold it. Return what it wrote.

    OSError, in one line that names the file, where it cannot be written.
    """
    if sound is None or path.suffix.lower() == _FILM:
        return []
    beside = path.with_suffix(WAV)
    write_wav(sound, beside)
    return [beside]


def write_wav(sound: Sound, path: Path) -> None:
    """Write sound [1,C,T] in 16 bits, whole or not at all. OSError, in one line that names the file."""
    from ..memory.files import writing

    samples = (sound.waveform[0].clamp(-1, 1) * _LOUDEST).round().short().T.contiguous().numpy()
    with writing(path) as part, part.open("wb") as raw, wave.open(raw, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(sound.sample_rate)
        file.writeframes(samples.astype("<i2").tobytes())


def add_stream(film: Any, sound: Sound) -> Any:
    """Return a stream for sound in a film that PyAV is to write. ValueError for more than two channels."""
    if (channels := sound.waveform.shape[1]) > 2:
        raise ValueError(f"the sound has {channels} channels; a film takes 1 or 2. Use {WAV}.")
    return film.add_stream("aac", rate=sound.sample_rate, layout="stereo" if channels == 2 else "mono")


def mux(av: Any, film: Any, stream: Any, sound: Sound) -> None:
    """Write sound [1,C,T] into its stream."""
    waveform = sound.waveform[0].clamp(-1, 1).contiguous().numpy()
    frame = av.AudioFrame.from_ndarray(waveform, format="fltp", layout=stream.layout.name)
    frame.sample_rate, frame.pts = sound.sample_rate, 0
    film.mux(stream.encode(frame))
    film.mux(stream.encode())
