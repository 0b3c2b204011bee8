"""Videos that the command line reads: an animation, a folder of frames, one picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ballast.commands.images import open_frames, write_image


def test_frames_come_in_their_order(tmp_path: Path) -> None:
    film = torch.stack([torch.full((8, 12, 3), shade) for shade in (0.0, 0.2, 1.0)])
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in (2, 0, 1):
        write_image(film[number], folder / f"{number:02}.png", ".png")
    write_image(film, tmp_path / "film.gif", ".gif")
    for path in (folder, tmp_path / "film.gif"):
        torch.testing.assert_close(open_frames(path), film, atol=0.02, rtol=0)
    assert open_frames(folder / "00.png").shape == (1, 8, 12, 3)


def test_a_folder_without_pictures_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no pictures. Give a folder of frames, or a film"):
        open_frames(tmp_path)
