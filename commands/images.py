"""Read and write pictures and videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    import torch

OUTPUTS = (".png", ".jpg", ".webp", ".gif", ".mp4")


def open_image(path: Path, width: int | None, height: int | None) -> torch.Tensor:
    """Read a picture as [1,H,W,3] in 0..1, resized if a size is given."""
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    if width or height:
        picture = picture.resize((width or picture.width, height or picture.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]


def opened_pictures(arguments: argparse.Namespace, edits: bool) -> tuple[list[torch.Tensor] | None, dict[str, Any]]:
    """The pictures of `add_picture_arguments`: those that belong to the prompt, and arguments of `sample` or `plan`.

    Where the model `edits`, --image belongs to the prompt.
    """
    opened = [open_image(path, None, None) for path in arguments.image or ()]
    given: dict[str, Any] = {} if edits or not opened else {"image": opened}
    if arguments.mask:
        given["mask"] = open_image(arguments.mask, None, None).mean(dim=3)
    if arguments.last_image:
        given["last_image"] = open_image(arguments.last_image, None, None)
    if arguments.control:
        given["control"] = open_image(arguments.control, None, None)
    if arguments.strength is not None:
        given["strength"] = arguments.strength
    return (opened or None) if edits else None, given


def save_images(images: torch.Tensor, out: Path, frame_rate: int = 24) -> list[Path]:
    """Write pictures [B,H,W,3] or videos [B,F,H,W,3] in 0..1; the second and further ones get a number.

    A video becomes a film (.mp4), an animation (.webp, .gif) or a numbered .png for each frame. Returns the files.
    """
    from PIL import Image

    written = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, item in enumerate((images * 255).round().byte().numpy()):
        path = out.with_stem(f"{out.stem}-{number}") if number else out
        frames = [Image.fromarray(frame) for frame in (item if item.ndim == 4 else item[None])]
        if path.suffix == ".mp4":
            _save_film(frames, path, frame_rate)
            written.append(path)
        elif len(frames) > 1 and path.suffix in (".webp", ".gif"):
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 // frame_rate, loop=0)
            written.append(path)
        elif len(frames) > 1:
            for index, frame in enumerate(frames):
                written.append(path.with_stem(f"{path.stem}-{index:04}"))
                frame.save(written[-1])
        else:
            frames[0].save(path)
            written.append(path)
    return written


def _save_film(frames: Sequence[Any], path: Path, frame_rate: int) -> None:
    """Write pictures as H.264. ImportError, with what to install, without PyAV."""
    try:
        import av
    except ImportError as error:
        raise ImportError(f"writing {path.name} needs PyAV: pip install av. Or use .webp, .gif or .png.") from error
    with av.open(str(path), "w") as film:
        stream = film.add_stream("libx264", rate=frame_rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            film.mux(stream.encode(av.VideoFrame.from_image(frame)))
        film.mux(stream.encode())
