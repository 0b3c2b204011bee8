"""Read and write pictures and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import argparse

    import torch

ANIMATIONS = (".webp", ".gif", ".mp4")
_STILLS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_FILMS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
OUTPUTS = (".png", ".jpg", ".webp", ".gif", ".mp4")


def open_image(path: Path | BinaryIO, width: int | None, height: int | None) -> torch.Tensor:
    """Read a picture as [1,H,W,3] in 0..1, resized if a size is given."""
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    if width or height:
        picture = picture.resize((width or picture.width, height or picture.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]


def frame_files(path: Path) -> list[Path]:
    """The files of a video: a film or an animation alone, or the pictures of a folder in the order of their names."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in _STILLS)
    if not files:
        raise ValueError(f"{path} holds no pictures. Give a folder of frames, or a film.")
    return files


def open_frames(path: Path, content: BinaryIO | None = None) -> torch.Tensor:
    """Read a video as [F,H,W,3] in 0..1: a film, an animation, or a folder of pictures in the order of their names.

    A picture is one frame. `content` is read in place of the file at `path`. ImportError, with what to install, for a
    film without PyAV.
    """
    import numpy as np
    import torch
    from PIL import Image, ImageSequence

    if path.is_dir():
        return torch.cat([open_image(file, None, None) for file in frame_files(path)])
    if path.suffix.lower() in _FILMS:
        try:
            import av
        except ImportError as error:
            raise ImportError(f"reading {path.name} needs PyAV: pip install av. Or give a folder of frames.") from error
        with av.open(content or str(path)) as film:
            arrays = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    else:
        with Image.open(content or path) as opened:
            arrays = [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(opened)]
    return torch.from_numpy(np.stack(arrays).astype(np.float32) / 255)


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
        given["control"] = open_frames(arguments.control)
    if arguments.video:
        given["video"] = open_frames(arguments.video)
    if arguments.strength is not None:
        given["strength"] = arguments.strength
    return (opened or None) if edits else None, given


def save_images(images: torch.Tensor, out: Path, frame_rate: int = 24) -> list[Path]:
    """Write pictures [B,H,W,3] or videos [B,F,H,W,3] in 0..1; the second and further ones get a number.

    A video becomes a film (.mp4), an animation (.webp, .gif) or a numbered .png for each frame. Returns the files.
    """
    written = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, item in enumerate(images):
        path = out.with_stem(f"{out.stem}-{number}") if number else out
        if item.ndim == 4 and len(item) > 1 and path.suffix not in ANIMATIONS:
            for index, frame in enumerate(item):
                written.append(path.with_stem(f"{path.stem}-{index:04}"))
                write_image(frame, written[-1], path.suffix)
        else:
            write_image(item, path, path.suffix, frame_rate)
            written.append(path)
    return written


def write_image(
    image: torch.Tensor, path: Path, suffix: str, frame_rate: int = 24, words: Mapping[str, str] | None = None
) -> None:
    """Write a picture [H,W,3] or a video [F,H,W,3] in 0..1 as what the suffix says, whatever the path ends in.

    What is brighter, as linear light may be, is written as white.
    `words` are text chunks by keyword, which PNG has.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    pixels = (image.clamp(0, 1) * 255).round().byte().numpy()
    frames = [Image.fromarray(frame) for frame in (pixels if pixels.ndim == 4 else pixels[None])]
    kind = Image.registered_extensions().get(suffix.lower(), "")
    if suffix == ".mp4":
        _save_film(frames, path, frame_rate)
    elif len(frames) > 1:
        frames[0].save(path, kind, save_all=True, append_images=frames[1:], duration=1000 // frame_rate, loop=0)
    else:
        chunks = PngInfo()
        for keyword, text in (words or {}).items():
            chunks.add_text(keyword, text)
        frames[0].save(path, kind, **({"pnginfo": chunks} if words and kind == "PNG" else {}))


def _save_film(frames: Sequence[Any], path: Path, frame_rate: int) -> None:
    """Write pictures as H.264 in MP4. ImportError, with what to install, without PyAV."""
    try:
        import av
    except ImportError as error:
        raise ImportError(f"writing {path.name} needs PyAV: pip install av. Or use .webp, .gif or .png.") from error
    with av.open(str(path), "w", format="mp4") as film:
        stream = film.add_stream("libx264", rate=frame_rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            film.mux(stream.encode(av.VideoFrame.from_image(frame)))
        film.mux(stream.encode())
