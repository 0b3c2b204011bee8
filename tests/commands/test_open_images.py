"""Pictures that the command line and lists read: as every viewer shows them, or refused in one line."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ballast.commands.images import open_frames, open_image, open_mask
from ballast.commands.request import Request
from PIL import Image, ImageCms

RED, BLUE = (255, 0, 0), (0, 0, 255)


def halves(width: int = 48, height: int = 32) -> Image.Image:
    """Red above blue."""
    pixels = np.full((height, width, 3), BLUE, np.uint8)
    pixels[: height // 2] = RED
    return Image.fromarray(pixels)


def ramp(dtype: type = np.uint16) -> np.ndarray[Any, Any]:
    return np.linspace(0, 65535, 16 * 24).reshape(16, 24).astype(dtype)


def refusal(call: Callable[[], object], path: Path) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said and str(path) in said
    return said


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_as_viewers_turn_them(orientation: int, suffix: str, tmp_path: Path) -> None:
    """Each is stored as a camera held another way stores it; all look alike."""
    undone = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's numbers of what was done to the upright one
    upright, path = Image.new("RGB", (64, 32)), tmp_path / f"photo.{suffix}"
    for number, shade in enumerate((20, 100, 180, 250)):  # another in each quarter
        upright.paste((shade,) * 3, (left := number % 2 * 32, top := number // 2 * 16, left + 32, top + 16))
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undone[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(path, exif=exif, **({} if suffix in ("png", "tif") else {"quality": 100}))
    for found in (open_image(path, None, None), open_frames(path)):
        torch.testing.assert_close(found[0], torch.from_numpy(np.array(upright) / 255).float(), atol=0.05, rtol=0)


@pytest.mark.parametrize("mode", ["L", "P", "I;16", "RGBA", "CMYK"])
def test_files_that_pillow_maps_are_turned_too(mode: str, tmp_path: Path) -> None:
    """Pillow maps what it need not decode: a TIFF without compression, in these modes."""
    rows = np.arange(32 * 48, dtype=np.uint16).reshape(32, 48) // 8
    stored = Image.fromarray(rows * 257) if mode == "I;16" else Image.fromarray(rows.astype(np.uint8)).convert(mode)
    path = tmp_path / "scan.tif"
    for orientation, turned in ((1, rows), (6, np.rot90(rows, 3)), (8, np.rot90(rows))):
        stored.save(path, tiffinfo={0x0112: orientation})
        torch.testing.assert_close(open_mask(path)[0], torch.tensor(turned / 255).float(), atol=1e-3, rtol=0)


def test_what_is_no_picture_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "page.jpg"
    path.write_text("<html>Log in to download</html>", "utf-8")
    for content in (None, io.BytesIO(path.read_bytes())):
        assert "is no picture that can be read here" in refusal(lambda c=content: open_image(path, None, None, c), path)


def test_a_mask_and_a_picture_in_a_list_are_turned_too(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("image", "mask", "control"):
        Image.new("L", (48, 32), 255).save(tmp_path / f"{name}.jpg", exif=exif)
    files = {name: [tmp_path / f"{name}.jpg"] for name in ("image", "mask", "control")}
    request = Request("a boat", "", {}, {}, files)
    for given in (request.item(False).sampling(), request.carried().item(False).sampling()):
        assert [list(given[name][0].shape) for name in files] == [[1, 48, 32, 3], [1, 48, 32], [1, 48, 32, 3]]


def test_broken_exif_turns_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "photo.jpg"
    for exif in (b"Exif\0\0MM\0*\0\0\0\x08\0\x02\x01\x12", b"Exif\0\0no TIFF at all", b"Exif\0\0"):
        halves().save(path, exif=exif)
        assert open_image(path, None, None).shape == (1, 32, 48, 3)
    assert not recwarn.list


@pytest.mark.parametrize("name", ["depth.png", "depth.tif", "depth.pgm", "depth.jp2"])
def test_grey_of_16_bits_keeps_its_shades(name: str, tmp_path: Path) -> None:
    Image.fromarray(ramp()).save(tmp_path / name)
    found = open_image(tmp_path / name, None, None)[0, :, :, 0]
    torch.testing.assert_close(found, torch.from_numpy(ramp() / 65535).float(), atol=0.003, rtol=0)
    torch.testing.assert_close(open_mask(tmp_path / name)[0], found)


def test_big_endian_grey(tmp_path: Path) -> None:
    """As Motorola's TIFF has it: 0x0100 is dark, 0x0001 is black."""
    path = tmp_path / "depth.tif"
    Image.frombytes("I;16B", (2, 1), struct.pack(">HH", 0x8000, 0x0001)).save(path)
    found = open_image(path, None, None)[0, 0, :, 0]
    torch.testing.assert_close(found, torch.tensor([0.5, 0.0]), atol=0.003, rtol=0)


@pytest.mark.parametrize(
    ("values", "words", "options"),
    [
        (ramp(np.float32), "mode F", {}),
        (ramp(np.int32), "mode I,", {}),
        (ramp(), "mode I;16", {"tiffinfo": {262: 0}}),  # white is 0
    ],
)
def test_numbers_without_a_white_are_refused(
    values: np.ndarray[Any, Any], words: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "depth.tif"
    Image.fromarray(values).save(path, **options)
    said = refusal(lambda: open_image(path, None, None), path)
    assert words in said and "Save it as a PNG of 8 or 16 bits." in said


def transparent(mode: str) -> Image.Image:
    """A picture whose right half is not to be seen."""
    picture = halves().convert("RGBA")
    picture.paste((0, 255, 0, 0), (24, 0, 48, 32))
    if mode == "P":
        clear = Image.new("P", (48, 32), 0)
        clear.putpalette([255, 0, 0, 0, 255, 0])
        clear.paste(1, (24, 0, 48, 32))
        clear.info["transparency"] = 1
        return clear
    if mode in ("L", "RGB"):
        keyed = Image.new(mode, (48, 32), "white")
        keyed.paste("black", (24, 0, 48, 32))
        keyed.info["transparency"] = 0 if mode == "L" else (0, 0, 0)
        return keyed
    return picture.convert(mode)


@pytest.mark.parametrize(("mode", "suffix"), [*((mode, "png") for mode in ("RGBA", "LA", "P", "L", "RGB")),
                                              ("RGBA", "webp"), ("P", "gif"), ("RGBA", "tif")])  # fmt: skip
def test_transparency_is_refused(mode: str, suffix: str, tmp_path: Path) -> None:
    """Of a picture what is behind it is not known; of a mask programs do not agree which half is painted anew."""
    path = tmp_path / f"clear.{suffix}"
    transparent(mode).save(path)
    for call in (lambda: open_image(path, None, None), lambda: open_mask(path), lambda: open_frames(path)):
        assert "is transparent in parts" in refusal(call, path)


def test_transparency_of_16_bits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clear.png"
    Image.fromarray(ramp()).save(path, transparency=0)
    assert "is transparent in parts" in refusal(lambda: open_image(path, None, None), path)


@pytest.mark.parametrize("depth", [2, 4])
def test_transparency_of_fewer_bits_is_refused(depth: int, tmp_path: Path) -> None:
    """Pillow spreads the greys over 8 bits, and leaves the transparent one as it is stored."""
    path = tmp_path / "clear.png"
    write_png(path, depth, (b"tRNS", b"\0\1"), colour=0)
    assert "is transparent in parts" in refusal(lambda: open_mask(path), path)
    write_png(path, depth, colour=0)
    assert open_mask(path).shape == (1, 1, 2)


def write_png(path: Path, depth: int, *chunks: tuple[bytes, bytes], colour: int = 2) -> None:
    """A PNG of two equal pixels in RGB, or of `colour` 0 in grey, with further chunks."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", 2, 1, depth, colour, 0, 0, 0)
    pixels = bytes(range(16, 16 + 3 * depth // 8)) * 2 if colour else bytes([0b01010101 if depth == 2 else 0b00010001])
    rows = zlib.compress(b"\0" + pixels)
    parts = [chunk(*each) for each in ((b"IHDR", head), *chunks, (b"IDAT", rows), (b"IEND", b""))]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ([(b"tRNS", bytes(range(16, 22)))], "is transparent in parts"),
        ([(b"gAMA", struct.pack(">I", 100_000))], r"of another brightness than sRGB (gamma 1). Save it in sRGB."),
        ([(b"cICP", bytes([9, 16, 0, 1]))], "is an HDR picture"),
        ([(b"gAMA", struct.pack(">I", 45_455))], ""),
        ([(b"gAMA", struct.pack(">I", 100_000)), (b"sRGB", b"\0")], ""),
        ([(b"cICP", bytes([1, 13, 0, 1]))], ""),
    ],
)
def test_what_a_png_says_of_its_numbers_is_heeded(chunks: list[tuple[bytes, bytes]], says: str, tmp_path: Path) -> None:
    path = tmp_path / "said.png"
    write_png(path, 16, *chunks)
    for call in (lambda: open_image(path, None, None), lambda: open_frames(path)):
        if says:
            assert says in refusal(call, path)
        else:
            assert call().shape == (1, 1, 2, 3)


def test_an_alpha_that_hides_nothing_is_taken(tmp_path: Path) -> None:
    expected = torch.from_numpy(np.array(halves()) / 255).float()
    for number, picture in enumerate((halves().convert("RGBA"), halves().quantize(4), halves().quantize(4))):
        path = tmp_path / f"{number}.png"
        picture.save(path, **({"transparency": 3} if number == 2 else {}))  # of a colour that no pixel has
        torch.testing.assert_close(open_image(path, None, None)[0], expected)
    Image.new("1", (48, 32), 1).save(tmp_path / "bits.png")
    assert float(open_mask(tmp_path / "bits.png").min()) == 1


def test_a_mask_with_colours_is_refused(tmp_path: Path) -> None:
    """A red stroke is 0.3 of white, which is nothing to paint anew."""
    halves().save(tmp_path / "mask.png")
    assert "has colours, and a mask is grey" in refusal(lambda: open_mask(tmp_path / "mask.png"), tmp_path / "mask.png")
    grey = Image.new("L", (48, 32))
    grey.paste(255, (24, 0, 48, 32))
    grey.convert("RGB").save(tmp_path / "mask.jpg", quality=30)
    torch.testing.assert_close(open_mask(tmp_path / "mask.jpg").mean(), torch.tensor(0.5), atol=0.01, rtol=0)


def test_colours_are_those_of_the_profile(tmp_path: Path) -> None:
    """A profile whose red and blue are swapped, a damaged one, and one for another kind of picture."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = srgb.replace(b"sRGB", b"odd ").replace("sRGB".encode("utf-16-be"), "odd ".encode("utf-16-be"))
    for old, new in ((b"rXYZ", b"tmp1"), (b"bXYZ", b"rXYZ"), (b"tmp1", b"bXYZ")):
        swapped = swapped.replace(old, new)
    expected = torch.from_numpy(np.array(halves()) / 255).float()
    for profile, found_as in ((srgb, expected), (swapped, expected.flip(2)), (b"no profile", expected)):
        halves().save(tmp_path / "photo.png", icc_profile=profile)
        found = open_image(tmp_path / "photo.png", None, None)[0]
        torch.testing.assert_close(found, found_as, atol=0.02, rtol=0)
    halves().convert("CMYK").save(tmp_path / "print.jpg", quality=100, icc_profile=srgb)
    torch.testing.assert_close(open_image(tmp_path / "print.jpg", None, None)[0], expected, atol=0.1, rtol=0)


def test_lab_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "photo.tif"
    Image.new("LAB", (48, 32)).save(path)
    assert "mode LAB" in refusal(lambda: open_image(path, None, None), path)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_of_an_animation_no_frame_is_chosen(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"film.{suffix}"
    Image.new("RGB", (48, 32), "red").save(
        path, save_all=True, append_images=[Image.new("RGB", (48, 32), "blue")], duration=40
    )
    assert "holds 2 pictures, and one is wanted" in refusal(lambda: open_image(path, None, None), path)
    assert open_frames(path).shape == (2, 32, 48, 3)


def test_what_viewers_do_not_show_is_no_frame(tmp_path: Path) -> None:
    """The gain map of a phone's photo, and the still of an animated PNG."""
    still, *frames = (Image.new("RGB", (48, 32), colour) for colour in ("red", "green", "blue"))
    still.save(tmp_path / "photo.jpg", "MPO", save_all=True, append_images=frames)
    assert open_image(tmp_path / "photo.jpg", None, None).shape == open_frames(tmp_path / "photo.jpg").shape
    still.save(tmp_path / "film.png", save_all=True, append_images=frames, default_image=True)
    assert open_frames(tmp_path / "film.png")[:, 0, 0, 0].tolist() == [0, 0]


def test_frames_of_unequal_sizes_are_named(tmp_path: Path) -> None:
    sizes = {"1.png": (48, 32), "2.png": (48, 32), "10.png": (32, 32)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / name)
    files = [tmp_path / name for name in sizes]
    request = Request("a boat", "", {}, {}, {"video": files})
    for call in (
        lambda: open_frames(tmp_path),
        request.item(False).sampling,
        request.carried().item(False).sampling,
    ):
        said = refusal(call, files[2])
        assert said == f"{files[0]} is 48 x 32, and {files[2]} is 32 x 32. Give all frames one size."
    pages = tmp_path / "pages.tif"
    Image.new("RGB", (48, 32)).save(pages, save_all=True, append_images=[Image.new("RGB", (32, 48))])
    said = refusal(lambda: open_frames(pages), pages)
    assert f"{pages}, frame 1, is 48 x 32, and {pages}, frame 2, is 32 x 48." in said


def test_frames_come_by_their_numbers(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        Image.new("L", (8, 8), number).save(tmp_path / f"frame{number}.png")
    (tmp_path / "._frame1.png").write_bytes(b"of a Mac")
    assert (open_frames(tmp_path)[:, 0, 0, 0] * 255).round().tolist() == [1, 2, 10]


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tif", "avif"])
def test_files_that_are_damaged_are_told_in_a_line(suffix: str, tmp_path: Path) -> None:
    path, content = tmp_path / f"photo.{suffix}", io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    try:
        Image.fromarray(noise).save(content, Image.registered_extensions()[f".{suffix}"])
    except (KeyError, OSError):
        pytest.skip("this Pillow writes none")
    for length in (0, 10, len(content.getvalue()) // 2):
        path.write_bytes(content.getvalue()[:length])
        for given in (None, io.BytesIO(path.read_bytes())):
            said = refusal(lambda given=given: open_image(path, None, None, given), path)  # type: ignore[misc]
            assert ("is empty" in said) == (not length)
    assert "there is no picture" in refusal(lambda: open_image(tmp_path / "none", None, None), tmp_path / "none")
    assert "no picture" in refusal(lambda: open_image(tmp_path, None, None), tmp_path)


def test_a_picture_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the pixels that Pillow warns of are refused; between, as phones make them, nothing is said."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    Image.new("L", (50, 50)).save(tmp_path / "large.png")
    Image.new("L", (40, 40)).save(tmp_path / "photo.png")
    for call in (open_image, lambda path, *_: open_frames(path)):
        said = refusal(lambda call=call: call(tmp_path / "large.png", None, None), tmp_path / "large.png")  # type: ignore[misc]
        assert "Scale it down." in said
        assert call(tmp_path / "photo.png", None, None).shape == (1, 40, 40, 3)


def film(path: Path, frame: np.ndarray[Any, Any], **context: Any) -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as made:
        stream = made.add_stream("libx264", rate=24, options={"crf": "1"})
        stream.height, stream.width = frame.shape[:2]
        stream.pix_fmt = "yuv420p"
        for name, value in context.items():
            setattr(stream.codec_context, name, value)
        for _ in range(2):
            made.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        made.mux(stream.encode())


def test_films_of_phones_are_turned(tmp_path: Path) -> None:
    """A phone that is held upright writes the matrix of a quarter turn to the right."""
    path = tmp_path / "film.mp4"
    film(path, np.array(halves(64, 48)))
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 44
    assert struct.unpack_from(">9i", content, at) == (65536, 0, 0, 0, 65536, 0, 0, 0, 2**30)
    struct.pack_into(">9i", content, at, 0, 65536, 0, -65536, 0, 0, 48 * 65536, 0, 2**30)
    path.write_bytes(content)
    frames = open_frames(path)
    assert frames.shape == (2, 64, 48, 3)
    assert frames[0, 32, 40, 0] > 0.8 and frames[0, 32, 8, 2] > 0.8  # above is right now


def test_films_that_are_none_are_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    film(path, np.array(halves(64, 48)), color_trc=16)
    assert "is an HDR film" in refusal(lambda: open_frames(path), path)
    for content in (b"", b"no film", path.read_bytes()[:300]):
        path.write_bytes(content)
        refusal(lambda: open_frames(path), path)
