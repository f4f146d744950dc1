"""Files of every mode become the pixels that a person sees, or are refused in one line that says why."""

import struct
import zlib

import numpy as np
import pytest
from failures import each
from pictures import encoded, pixels
from PIL import Image

from matmix.data.images.decode import UnreadablePicture, decode

RGB = pixels(1)


def decoded(data, **options):
    return np.asarray(decode(data, **options))


def test_formats_without_loss_give_their_pixels_back():
    for kind in ("PNG", "BMP", "TIFF", "PPM"):
        assert np.array_equal(decoded(encoded(RGB, kind)), RGB)
    assert np.array_equal(decoded(encoded(RGB, "WEBP", lossless=True)), RGB)


def test_transparent_pixels_show_the_background():
    alpha = np.zeros(RGB.shape[:2], np.uint8)
    alpha[:, 6:] = 255
    alpha[0] = 128
    data = encoded(np.dstack([RGB, alpha]))
    for background in (255, 0):
        share = alpha[..., None] / 255
        assert np.abs(decoded(data, background=background) - (RGB * share + background * (1 - share))).max() <= 1
    assert decoded(encoded(np.dstack([RGB[..., 0], alpha])))[1, 0].tolist() == [255, 255, 255]


def test_a_palette_with_a_transparent_colour():
    image = Image.fromarray((pixels(2)[..., 0] > 128).astype(np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 200, 100, 50])
    data = encoded(image, transparency=0)
    assert {tuple(pixel) for pixel in decoded(data).reshape(-1, 3)} == {(255, 255, 255), (200, 100, 50)}


def test_sixteen_bits_of_grey_keep_their_range():
    grey = np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16)
    expected = np.round(grey / 257).astype(np.uint8)
    for kind in ("PNG", "TIFF"):
        assert decoded(encoded(Image.fromarray(grey), kind), channels=1).tolist() == expected.tolist()


def test_sixteen_bits_of_each_colour_keep_the_upper_ones():
    values = np.random.default_rng(0).integers(0, 1 << 16, (3, 5, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    assert np.array_equal(decoded(_png(5, 3, rows, depth=16)), values >> 8)


def test_cmyk_has_the_colours_of_its_picture():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = decoded(encoded(image, "JPEG", quality=100))[4, 4]
    assert red[0] > 200
    assert max(red[1:]) < 60


def test_one_channel_is_the_brightness():
    expected = np.asarray(Image.fromarray(RGB).convert("L"))
    assert np.array_equal(decoded(encoded(RGB), channels=1), expected)
    assert decode(encoded(RGB[..., 0]), channels=3).mode == "RGB"


def test_a_turned_picture_is_turned_back():
    exif = Image.Exif()
    exif[0x0112] = 6  # what is stored is to be turned by 90 degrees to the right
    assert np.array_equal(decoded(encoded(RGB, exif=exif)), np.rot90(RGB, -1))


def _png(width, height, rows, depth=8):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _zeroed(kind, mark, offset, size=4):
    """A file in which width and height, which stand `offset` bytes after `mark`, are 0."""
    data = bytearray(encoded(RGB, kind))
    place = data.index(mark) + offset
    data[place : place + size] = bytes(size)
    return bytes(data)


REFUSED = {
    "empty file": (b"", "empty"),
    "text": (b"this is no picture", "no picture of a known kind"),
    "floats": (encoded(Image.new("F", (3, 3)), "TIFF"), "mode F"),
    "32-bit integers": (encoded(Image.new("I", (3, 3)), "TIFF"), "mode I,"),
    "LAB": (encoded(Image.new("LAB", (3, 3)), "TIFF"), "mode LAB"),
    "truncated PNG": (encoded(pixels(3, 60, 60))[:-200], "truncated"),
    "truncated JPEG": (encoded(pixels(3, 60, 60), "JPEG")[:-200], "truncated"),
    "truncated WebP": (encoded(pixels(3, 60, 60), "WEBP")[:-60], "truncated"),
    "BMP of no width": (_zeroed("BMP", b"BM", 18), "no pixels|known kind|truncated"),
    "JPEG of no size": (_zeroed("JPEG", b"\xff\xc0", 5), "known kind"),
    "GIF of no size": (_zeroed("GIF", b",\0\0\0\0", 5), "no pixels|known kind|truncated"),
    "PNG of no size": (_png(0, 0, b""), "known kind"),
    "PPM of no height": (b"P6\n3 0\n255\n", "known kind"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "known kind"),
}


@each("case", REFUSED)
def test_refused(case):
    data, reason = REFUSED[case]
    with pytest.raises(UnreadablePicture, match=reason) as error:
        decode(data)
    assert "\n" not in str(error.value)


def test_a_large_picture_is_refused_before_it_is_decoded():
    with pytest.raises(UnreadablePicture, match=r"1\.0 megapixels, more than 0\.5"):
        decode(encoded(Image.new("1", (1000, 1000))), megapixels=0.5)
