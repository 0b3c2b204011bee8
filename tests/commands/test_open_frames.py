"""Videos that the command line reads: an animation, a folder of frames, one picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize(
    ("name", "codec", "layout"),
    [("film.mov", "prores_ks", "yuva444p10le"), ("film.mkv", "ffv1", "bgra"), ("film.webm", "libvpx-vp9", "yuva420p")],
)
def test_transparency_of_films_is_refused(name: str, codec: str, layout: str, tmp_path: Path) -> None:
    """As that of pictures; a film that only could be transparent is read, but for WebM, of which nothing tells."""
    av = pytest.importorskip("av")
    path = tmp_path / name
    for alpha in (0, 255):
        pixels = np.full((48, 64, 4), 120, np.uint8)
        pixels[:, 32:, 3], pixels[:, :32, 3] = alpha, 255
        with av.open(str(path), "w") as film:
            stream = film.add_stream(codec, rate=8)
            stream.width, stream.height, stream.pix_fmt = 64, 48, layout
            frame = av.VideoFrame.from_ndarray(pixels, format="rgba").reformat(format=layout)
            film.mux([*stream.encode(frame), *stream.encode()])
        if alpha == 255 and name != "film.webm":
            torch.testing.assert_close(open_frames(path), torch.full((1, 48, 64, 3), 120 / 255), atol=0.02, rtol=0)
            continue
        with pytest.raises(ValueError, match="transparen") as caught:
            open_frames(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
