"""Encoded pictures to pixels: red, green and blue, or brightness, 8 bits each, whatever the file has.

Transparent pixels show the background, 16 bits of grey become 8, CMYK and palettes are converted, and a picture that
its Exif data calls turned is turned back. What has no known range or colours (floats, LAB, HSV) is refused.
"""

import contextlib
import io
import warnings

import numpy as np
from PIL import Image, ImageOps

# Pillow knows more of them, some of which run other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_PLAIN = ("1", "L", "P", "RGB", "CMYK", "YCbCr")
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
_ORIENTATION = 0x0112
MEGAPIXELS = 100.0
"""Size of the largest picture that is decoded, unless another is given."""


class UnreadablePicture(ValueError):
    """A file that gives no picture; the text is the reason, without the file's name."""


def decode(
    data: bytes | memoryview, *, channels: int = 3, background: int = 255, megapixels: float = MEGAPIXELS
) -> Image.Image:
    """Returns the picture in the bytes of a file, of mode RGB or, for one channel, L. background: brightness (0 to 255)
    behind transparent pixels. Raises UnreadablePicture for what is no whole picture, or larger than `megapixels`."""
    if not len(data):
        raise UnreadablePicture("it is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large pictures and odd metadata
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            width, height = image.size
            if width < 1 or height < 1:
                raise UnreadablePicture(f"it has no pixels ({width} x {height})")
            if width * height > megapixels * 1e6:
                raise UnreadablePicture(f"it has {width * height / 1e6:.1f} megapixels, more than {megapixels:g}")
            image.load()
            with contextlib.suppress(Exception):  # damaged metadata beside a good picture
                if image.getexif().get(_ORIENTATION, 1) != 1:
                    image = ImageOps.exif_transpose(image)
    except UnreadablePicture:
        raise
    except Image.UnidentifiedImageError:
        raise UnreadablePicture(f"it is no picture of a known kind ({', '.join(_FORMATS)})") from None
    except Exception as error:  # of a damaged file, which has many kinds
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise UnreadablePicture(f"it is truncated or damaged ({reason})") from None
    image = _opaque(image, background)
    mode = "RGB" if channels == 3 else "L"
    return image if image.mode == mode else image.convert(mode)


def _opaque(image: Image.Image, background: int) -> Image.Image:
    if image.mode in _TRANSPARENT or (image.mode in _PLAIN and "transparency" in image.info):
        base = Image.new("RGBA", image.size, (background, background, background, 255))
        base.alpha_composite(image.convert("RGBA"))
        return base.convert("RGB")
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode not in _PLAIN:
        raise UnreadablePicture(f"it has the mode {image.mode}, whose range or colours are not known; convert it")
    return image
