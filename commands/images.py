"""Read and write pictures and videos."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .sounds import WAV, add_stream, mux, part_of, write_beside

if TYPE_CHECKING:
    import argparse
    from types import ModuleType

    import torch
    from PIL.Image import Image

    from ..pipelines.stock.sound import Sound

ANIMATIONS = (".webp", ".gif", ".mp4")
_STILLS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif")
_FILMS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
PICTURES = (".png", ".jpg", ".webp")
VIDEOS = (*ANIMATIONS, ".png", ".jpg")
_NO_FILM = "Or use .webp, .gif or .png."
_NUMBERS = re.compile(r"(\d+)")
_FIRST_ONLY = ("MPO", "PSD")  # beside their first picture they hold a preview, a gain map, or its layers
_MODES = ("1", "L", "P", "LA", "PA", "RGB", "RGBX", "RGBA", "CMYK", "YCbCr", "HSV")  # of 8 bits, with a known white
_MOST_CHROMA = 0.1  # of a grey picture that a JPEG has made coloured
_TRANSPARENT = "{} is transparent in parts, and what is behind is not said. Fill them; of a mask, with black or white."
_ORIENTATION = 0x0112  # of EXIF, with what undoes it
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262  # tags; 1 is black at 0
_GAMMA = 0.45455  # of PNGs in sRGB, 1 / 2.2
_HDR_CURVES = (16, 18)  # PQ and HLG, as H.273 numbers them


def open_image(path: Path, width: int | None, height: int | None, content: io.BytesIO | None = None) -> torch.Tensor:
    """Read a picture as [1,H,W,3] in 0..1, resized if a size is given. `content` is read in place of the file.

    ValueError or OSError, in one line that names the file, for what is no single picture.
    """
    from PIL import Image

    with _opened(path, content) as opened:
        if (count := getattr(opened, "n_frames", 1)) > 1 and opened.format not in _FIRST_ONLY:
            raise ValueError(f"{path} holds {count} pictures, and one is wanted here. Save that one as a PNG.")
        picture = _as_seen(opened, path)
    if width or height:
        picture = picture.resize((width or picture.width, height or picture.height), Image.Resampling.LANCZOS)
    return _tensor([picture])


def open_mask(path: Path, content: io.BytesIO | None = None) -> torch.Tensor:
    """Read a mask as [1,H,W] in 0..1. ValueError, in one line, for a picture with colours, which are no more or less.

    Transparency is refused as of any picture: some programs mean by it what to paint anew, others what to keep.
    """
    picture = open_image(path, None, None, content)
    if float((picture.amax(3) - picture.amin(3)).max()) > _MOST_CHROMA:
        raise ValueError(f"{path} has colours, and a mask is grey: white where to paint anew, black where not.")
    return picture.mean(dim=3)


def frame_files(path: Path) -> list[Path]:
    """Return the files of a video: a film or an animation alone, or a folder's pictures in the order of their names.

    Numbers in names count as numbers: frame2.png comes before frame10.png.
    """
    if not path.is_dir():
        return [path]
    files = [file for file in path.iterdir() if file.suffix.lower() in _STILLS and not file.name.startswith(".")]
    if not files:
        raise ValueError(f"{path} holds no pictures. Give a folder of frames, or a film.")
    return sorted(
        files, key=lambda file: [int(part) if part.isdecimal() else part for part in _NUMBERS.split(file.name)]
    )


def open_frames(path: Path, content: io.BytesIO | None = None) -> torch.Tensor:
    """Read a video as [F,H,W,3] in 0..1: a film, an animation, or a folder of pictures in the order of their names.

    A picture is one frame. `content` is read in place of the file at `path`. ImportError, with what to install, for a
    film without PyAV; ValueError or OSError, in one line that names the file, for what is none.
    """
    from PIL import ImageSequence

    if path.is_dir():
        return joined([(str(file), open_image(file, None, None)) for file in frame_files(path)])
    if path.suffix.lower() in _FILMS:
        return _film_frames(path, content)
    with _opened(path, content) as opened:
        if opened.format in _FIRST_ONLY:
            return _tensor([_as_seen(opened, path)])
        pictures = [_as_seen(frame, path) for frame in ImageSequence.Iterator(opened)]
        if opened.info.get("default_image"):  # of a PNG, for programs that do not know animations
            del pictures[0]
    return joined([(f"{path}, frame {number},", _tensor([each])) for number, each in enumerate(pictures, 1)])


def joined(frames: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Pictures [F,H,W,3] that are one video, by name. ValueError, in one line, for frames of unequal sizes."""
    import torch

    (first, whole), *others = frames
    for name, frame in others:
        if frame.shape[1:3] != whole.shape[1:3]:
            (rows, columns), (height, width) = frame.shape[1:3], whole.shape[1:3]
            raise ValueError(
                f"{first} is {width} x {height}, and {name} is {columns} x {rows}. Give all frames one size."
            )
    return torch.cat([frame for _, frame in frames])


@contextmanager
def _opened(path: Path, content: io.BytesIO | None) -> Iterator[Image]:
    """Yield a picture of Pillow's, until the block ends. What it says of the file becomes one line with the path."""
    from PIL import Image, UnidentifiedImageError

    from ..memory.files import one_line

    if not (content or path.is_file()):
        raise FileNotFoundError(f"there is no picture {path}. Put it there, or name another.")
    if not (len(content.getbuffer()) if content else path.stat().st_size):
        raise ValueError(f"{path} is empty: a file of 0 bytes. Make it again.")
    with one_line(path, "read as a picture"), warnings.catch_warnings(), ExitStack() as files:
        warnings.simplefilter("ignore")  # of size and of broken EXIF, on two lines each
        try:
            # By its path, Pillow 13 maps a TIFF into memory, and mixes up the rows of one that lies on its side.
            with Image.open(content or files.enter_context(path.open("rb"))) as opened:
                yield opened
        except UnidentifiedImageError:
            raise ValueError(f"{path} is no picture that can be read here. Save it as a PNG.") from None
        except Image.DecompressionBombError:
            most = 2 * (Image.MAX_IMAGE_PIXELS or 0) // 10**6
            raise ValueError(f"{path} has more than {most} million pixels. Scale it down.") from None


def _as_seen(picture: Image, path: Path) -> Image:
    """Return the picture in 8 bits of sRGB as viewers show it: turned, and by its colour profile.

    ValueError, in one line, for transparency, and for numbers of which no file says how bright they are.
    """
    from PIL import Image

    if picture.format == "PNG":
        _check_png(picture, path)
    picture.load()  # first: Pillow itself turns TIFF then, and says so
    icc, grey_bits = picture.info.get("icc_profile"), _grey_bits(picture)
    with suppress(Exception):  # of EXIF that is broken; viewers show such pictures as they lie
        if turn := _TURNS.get(int(picture.getexif()[_ORIENTATION])):
            picture = picture.transpose(Image.Transpose[turn])
    if grey_bits:
        import numpy as np

        values, clear = np.asarray(picture).astype(np.int64), picture.info.get("transparency")
        if clear is not None and (values == clear).any():
            raise ValueError(_TRANSPARENT.format(path))
        most = 2**grey_bits - 1
        return Image.fromarray(((values * 255 + most // 2) // most).astype(np.uint8)).convert("RGB")
    if picture.mode not in _MODES:
        raise ValueError(
            f"{path} holds numbers of Pillow's mode {picture.mode}, and how bright they are is not said. "
            "Save it as a PNG of 8 or 16 bits."
        )
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        if picture.getchannel("A").point(lambda alpha: alpha < 255).getbbox():
            raise ValueError(_TRANSPARENT.format(path))
    if picture.mode not in ("L", "CMYK"):
        picture = picture.convert("L" if picture.mode == "1" else "RGB")
    return (_in_srgb(picture, icc) if icc else picture).convert("RGB")


def _check_png(picture: Image, path: Path) -> None:
    """Raise ValueError, in one line, for what a PNG says of its numbers and Pillow does not heed."""
    info: Any = picture.info
    if "transparency" in info and picture.mode in ("L", "RGB") and ";" in str(getattr(picture, "tile", "")):
        raise ValueError(_TRANSPARENT.format(path))  # its number has 2, 4 or 16 bits, and is looked for among 8
    if _png_curve(picture) in _HDR_CURVES:
        raise ValueError(f"{path} is an HDR picture, and models take others. Convert it to SDR.")
    gamma = info.get("gamma", _GAMMA)
    if not {"icc_profile", "srgb"} & info.keys() and abs(gamma - _GAMMA) > 0.05 * _GAMMA:
        raise ValueError(f"{path} is of another brightness than sRGB (gamma {gamma:g}). Save it in sRGB.")


def _png_curve(picture: Image) -> int | None:
    """Return the transfer curve that a PNG names, as H.273 numbers it."""
    file: Any = getattr(picture, "fp", None)
    if file is None:
        return None
    place = file.tell()
    try:
        file.seek(8)
        while len(head := file.read(8)) == 8 and head[4:] != b"IDAT":
            content = file.read(int.from_bytes(head[:4], "big") + 4)
            if head[4:] == b"cICP" and len(content) > 1:
                return content[1]
        return None
    finally:
        file.seek(place)


def _grey_bits(picture: Image) -> int:
    """Return how many bits the numbers of a picture in more than 8 bits of grey have.

    0 for others, or where none tells.
    """
    if picture.format == "TIFF":
        tags: Any = getattr(picture, "tag_v2", {})
        is_plain = tags.get(_TIFF_PHOTOMETRIC) == 1 and tags.get(_TIFF_BITS) == (16,)
        return 16 if picture.mode.startswith("I;16") and is_plain else 0
    is_sixteen = picture.mode.startswith("I;16") or picture.mode == "I"  # PNG by older Pillow, and PGM
    return 16 if is_sixteen and picture.format in ("PNG", "PPM", "JPEG2000") else 0


def _in_srgb(picture: Image, icc: bytes) -> Image:
    """Return the colours that a profile means, in sRGB; as they are where it is of no such picture, or damaged."""
    from PIL import ImageCms

    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
        if "sRGB" in ImageCms.getProfileDescription(profile):
            return picture
        return ImageCms.profileToProfile(picture, profile, ImageCms.createProfile("sRGB"), outputMode="RGB") or picture
    except (ImageCms.PyCMSError, OSError):
        return picture


def _film_frames(path: Path, content: io.BytesIO | None) -> torch.Tensor:
    import numpy as np
    import torch

    from ..memory.files import one_line

    av = _pyav(f"reading {path.name}", "Or give a folder of frames.")
    with one_line(path, "read as a film"), av.open(content or str(path)) as film:
        if not film.streams.video:
            raise ValueError(f"{path} has no pictures. Give another film.")
        stream = film.streams.video[0]
        if stream.codec_context.color_trc in _HDR_CURVES:
            raise ValueError(f"{path} is an HDR film, and models take others. Convert it to SDR.")
        if stream.metadata.get("alpha_mode") == "1":  # of WebM, where FFmpeg's own decoders skip it
            raise ValueError(f"{path} has a layer of transparency, which is not read. Save it without.")
        arrays = [_pixels(frame, path) for frame in film.decode(video=0)]
        if not arrays:
            raise ValueError(f"{path} has no frames. Give another film.")
        return torch.from_numpy(np.stack(arrays).astype(np.float32) / 255)


def _pixels(frame: Any, path: Path) -> Any:
    """Return the pixels [H,W,3] of a film's frame. ValueError, in one line, for transparency."""
    import numpy as np

    has_alpha = any(part.is_alpha for part in frame.format.components)
    if has_alpha and frame.to_ndarray(format="rgba")[..., 3].min() < 255:
        raise ValueError(_TRANSPARENT.format(path))
    return np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)


def _pyav(task: str, instead: str) -> ModuleType:
    """PyAV. ImportError, in one line, where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise ImportError(f'{task} needs PyAV: "{sys.executable}" -m pip install av. {instead}') from error
    return av


def _tensor(pictures: Sequence[Image]) -> torch.Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([np.array(picture, dtype=np.float32) for picture in pictures]) / 255)


def opened_pictures(arguments: argparse.Namespace, edits: bool) -> tuple[list[torch.Tensor] | None, dict[str, Any]]:
    """Return the pictures of `add_picture_arguments`: those of the prompt, and arguments of `sample` or `plan`.

    Where the model `edits`, --image belongs to the prompt.
    """
    opened = [open_image(path, None, None) for path in arguments.image or ()]
    given: dict[str, Any] = {} if edits or not opened else {"image": opened}
    if arguments.mask:
        given["mask"] = open_mask(arguments.mask)
    if arguments.last_image:
        given["last_image"] = open_image(arguments.last_image, None, None)
    if arguments.control:
        followed = [open_frames(path) for path in arguments.control]
        given["control"] = followed if len(followed) > 1 else followed[0]
    if arguments.video:
        given["video"] = open_frames(arguments.video)
    if arguments.strength is not None:
        given["strength"] = arguments.strength
    return (opened or None) if edits else None, given


def save_images(images: torch.Tensor, out: Path, frame_rate: int = 24, sound: Sound | None = None) -> list[Path]:
    """Write pictures [B,H,W,3] or videos [B,F,H,W,3] in 0..1; the second and further ones get a number.

    A video becomes a film (.mp4), an animation (.webp, .gif) or a numbered .png for each frame. Its sound is in the
    film, or in a .wav beside the others. Each is written whole or not at all. Returns the files. OSError, in one line
    that names the file, where one cannot be written.
    """
    written = []
    for number, item in enumerate(images):
        path = out.with_stem(f"{out.stem}-{number}") if number else out
        each = [(path, item)]
        if item.ndim == 4 and len(item) > 1 and path.suffix.lower() not in ANIMATIONS:
            each = [(path.with_stem(f"{path.stem}-{index:04}"), frame) for index, frame in enumerate(item)]
        heard = part_of(sound, number)
        for one, content in each:
            write_whole(content, one, frame_rate, sound=heard)
            written.append(one)
        written += write_beside(heard, path)
    return written


def write_whole(
    image: torch.Tensor,
    path: Path,
    frame_rate: int = 24,
    words: Mapping[str, str] | None = None,
    sound: Sound | None = None,
) -> None:
    """Write as `write_image` does, whole or not at all. OSError, in one line that names the file."""
    from ..memory.files import writing

    with writing(path) as part:
        write_image(image, part, path.suffix, frame_rate, words, sound)


def save_picture(picture: Image, path: Path) -> None:
    """Write a picture of Pillow's, whole or not at all. OSError, in one line that names the file."""
    from PIL import Image

    from ..memory.files import writing

    with writing(path) as part:
        picture.save(part, Image.registered_extensions()[path.suffix.lower()])


def check_output(out: Path, is_video: bool, title: str, makes_sound: bool = False) -> None:
    """Raise ValueError, in one line, for a file of another kind than a pipeline's pictures or videos become.

    Sound alone becomes a .wav.
    """
    kinds = (*VIDEOS, *[WAV] * makes_sound) if is_video else PICTURES
    if out.suffix.lower() not in kinds:
        what = "videos" if is_video else "pictures"
        raise ValueError(f"cannot write {out}: {title} makes {what}. Use a name that ends in {', '.join(kinds)}.")


def check_film(suffix: str) -> None:
    """Raise ImportError or ValueError, in one line, where a name that ends so wants a film, and none can be written."""
    if suffix.lower() == ".mp4":
        av = _pyav("writing a film", _NO_FILM)
        if "libx264" not in av.codecs_available:
            raise ValueError(f"this PyAV has no libx264, which films are written with. {_NO_FILM}")


def write_image(
    image: torch.Tensor,
    path: Path,
    suffix: str,
    frame_rate: int = 24,
    words: Mapping[str, str] | None = None,
    sound: Sound | None = None,
) -> None:
    """Write a picture [H,W,3] or a video [F,H,W,3] in 0..1 as what the suffix says, whatever the path ends in.

    What is brighter, as linear light may be, is written as white.
    `words` are text chunks by keyword, which PNG has, and `sound` [1,C,T] is heard in a film.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    pixels = (image.clamp(0, 1) * 255).round().byte().numpy()
    frames = [Image.fromarray(frame) for frame in (pixels if pixels.ndim == 4 else pixels[None])]
    kind = Image.registered_extensions().get(suffix.lower(), "")
    if suffix.lower() == ".mp4":
        _save_film(frames, path, frame_rate, sound)
    elif len(frames) > 1:
        frames[0].save(path, kind, save_all=True, append_images=frames[1:], duration=1000 // frame_rate, loop=0)
    else:
        chunks = PngInfo()
        for keyword, text in (words or {}).items():
            chunks.add_text(keyword, text)
        frames[0].save(path, kind, **({"pnginfo": chunks} if words and kind == "PNG" else {}))


def _save_film(frames: Sequence[Any], path: Path, frame_rate: int, sound: Sound | None) -> None:
    """Write pictures as H.264 in MP4, and sound as AAC. ImportError, with what to install, without PyAV."""
    av = _pyav("writing a film", _NO_FILM)
    with av.open(str(path), "w", format="mp4") as film:
        stream = film.add_stream("libx264", rate=frame_rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        heard = sound and add_stream(film, sound)
        for frame in frames:
            film.mux(stream.encode(av.VideoFrame.from_image(frame)))
        film.mux(stream.encode())
        if sound is not None:
            mux(av, film, heard, sound)
