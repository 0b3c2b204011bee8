"""Results of a batch: named by what they are made of, written once, and found again by a run that goes on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .images import write_whole
from .sounds import part_of, write_beside

if TYPE_CHECKING:
    import torch

    from ..pipelines.stock.sound import Sound

LATENTS = "latents"  # the folder in the results' own of what is sampled, and not decoded yet
_SLUG = re.compile(r"[^a-z0-9]+")
_LONGEST_SLUG = 40


@dataclass(frozen=True)
class Result:
    """The pictures of one line: `settings` are all that decides them, as plain data, `count` how many there are."""

    folder: Path
    suffix: str
    settings: Mapping[str, Any]
    count: int

    @property
    def digest(self) -> str:
        """The digest of the settings."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def paths(self) -> list[Path]:
        """Where the pictures go."""
        slug = _SLUG.sub("-", self.settings["prompt"].lower()).strip("-")[:_LONGEST_SLUG].strip("-")
        stem = f"{slug}-{self.digest}" if slug else self.digest
        names = [stem] if self.count == 1 else [f"{stem}-{number}" for number in range(self.count)]
        return [self.folder / f"{name}{self.suffix}" for name in names]

    @property
    def is_done(self) -> bool:
        """Return whether all pictures are there."""
        return all(map(_is_there, self.paths))

    @property
    def latents(self) -> Path:
        """Where the latents wait to be decoded."""
        return self.folder / LATENTS / f"{self.digest}.latent"

    def forget_latents(self) -> None:
        """Remove the latents, if there are any: the pictures are there."""
        self.latents.unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty, or not there
            self.latents.parent.rmdir()

    def write(self, images: torch.Tensor, frame_rate: int, sound: Sound | None = None) -> list[Path]:
        """Write the pictures that are not there yet, with their sound, each whole or not at all. Return where they are.

        OSError, in one line, where the folder takes no more: it says where the latents are, or the pictures instead.
        """
        from ..memory.files import cache_home

        try:
            self._write(images, frame_rate, sound)
        except OSError as error:
            if _is_there(self.latents):
                raise OSError(f"{error} The latents are in {self.latents.parent}: run the list again.") from error
            elsewhere = replace(self, folder=cache_home() / "results")
            try:
                elsewhere._write(images, frame_rate, sound)
            except OSError:
                raise error from None
            raise OSError(f"{error} It is in {elsewhere.folder}: move it, and run the list again.") from error
        return self.paths

    def _write(self, images: torch.Tensor, frame_rate: int, sound: Sound | None) -> None:
        for number, (path, image) in enumerate(zip(self.paths, images, strict=True)):
            if not _is_there(path):
                heard = part_of(sound, number)
                write_beside(heard, path)
                write_whole(image, path, frame_rate, self._words(number), heard)

    def _words(self, number: int) -> dict[str, str]:
        """Return what a PNG says of its picture. Description and Software are PNG's own keywords."""
        seed = self.settings["seed"]
        facts = dict(self.settings) | ({"seed": (seed + number) % 2**64} if isinstance(seed, int) else {})
        return {"Description": self.settings["prompt"], "Software": "Ballast", "ballast": json.dumps(facts)}


def _is_there(path: Path) -> bool:
    """Return whether a file is there and holds anything: a power cut leaves files of 0 bytes."""
    return path.is_file() and path.stat().st_size > 0


class LatentFiles(MutableMapping[int, Any]):
    """The latents of some results, by their numbers, in files beside them."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and _is_there(self._results[number].latents)

    def __getitem__(self, number: int) -> torch.Tensor:
        from ..pipelines.decoding.rescue import load_latents

        try:
            return load_latents(self._results[number].latents)
        except ValueError:  # of a disk that lost some of it
            del self[number]
            raise

    def __setitem__(self, number: int, latents: torch.Tensor) -> None:
        from ..memory.files import cache_home
        from ..pipelines.decoding.rescue import rescued, save_latents

        path = self._results[number].latents
        advice = f"Where there is room again, move it to {path}, and run the list once more."
        with rescued(latents, cache_home() / "latents", path.stem, {}, advice):
            save_latents(latents, path)

    def __delitem__(self, number: int) -> None:
        self._results[number].forget_latents()

    def __iter__(self) -> Iterator[int]:
        return (number for number in range(len(self._results)) if number in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
