"""Decodes the bytes of an image file to upright RGB pixels, or says why that is impossible.

Only listed formats are tried, regardless of file names; the size is read from the header and checked before any pixel
is decoded; orientation tags are honoured; 16-bit and float images are scaled, never clipped. Transparency is dropped,
not composited: torchvision's, timm's and TensorFlow's readers also pass the colours under it to a classifier, so
weights from there see the pixels they were trained on. Only the first frame of an animation is used.

The memory for decoding is estimated in advance: the peak number of bytes until the pixels are upright RGB.

Pillow takes 4 bytes per pixel in any mode: once for the decoded image, once for RGB and once for the rotated image.
libwebp adds two canvases of 4 bytes and a copy, a progressive JPEG its coefficients (measured as resident memory).

It also lists the file suffixes that are read, and what to do about others.

Masks are read as stored: class indices, never scaled and never looked up in a palette.
"""

import io
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from vitrail.core.errors import BadImage
from vitrail.core.text import Pair
from vitrail.data.decode.exif_tiff import TURNING, UPRIGHT, find_orientation
from vitrail.data.decode.headers import FORMATS, check_png, detect_format, read_header

USUAL: Final = 12  # bytes a pixel
# Formats whose decoders keep more.
MORE: Final = {"TIFF": 16, "WEBP": 20, "AVIF": 24, "HEIC": 24}
SMALL: Final = 1 << 24  # pixels that any file may have; beyond them ...
DENSITY: Final = 2000  # ... no more than this many a byte: PNG packs greys up to 1032, JPEG about 340
# These compress a single colour without limit, and cost most; photographs have 10 to 50, AVIF and HEIC up to 200.
DENSE: Final = {"WEBP": 200, "AVIF": 400, "HEIC": 400}


def decoding_bytes(kind: str, size: tuple[int, int], length: int) -> int:
    """The bytes that decoding takes for a file of `length` bytes and (width, height) `size`."""
    return MORE.get(kind, USUAL) * size[0] * size[1] + 2 * length


def check_size(kind: str, size: tuple[int, int], length: int, max_pixels: int) -> int:
    """The bytes that decoding takes. BadImage for more pixels than allowed, or than a file of `length` bytes can
    plausibly hold, or if decoding takes too much memory."""
    shape, pixels, takes = f"{size[0]} x {size[1]} pixels", size[0] * size[1], decoding_bytes(kind, size, length)
    if pixels > max_pixels:
        raise BadImage(f"{shape} are more than the limit of {max_pixels:,}")
    if pixels > max(SMALL, DENSE.get(kind, DENSITY) * length):
        raise BadImage(f"a decompression bomb: {shape} claimed by {length:,} bytes")
    if takes > MAX_BYTES:
        most = f"at most {MAX_BYTES / 1e9:.1f} GB is allowed"
        raise BadImage(f"{kind} of {shape}, which takes {takes / 1e9:.1f} GB to decode; {most}")
    return takes


HEIC_EXTRA: Final = "pip install 'vitrail[heic]'"
# Suffixes of files that are read, that are read with an extra, and of images that are not read.
READ, HEIC, UNREAD = (
    tuple(f".{end}" for end in ends.split())
    for ends in (
        "jpg jpeg jpe jfif png webp gif bmp tif tiff ppm pgm pbm pnm avif",
        "heic heif hif",
        "cr2 cr3 crw nef nrw arw srf sr2 dng raf orf rw2 pef srw x3f 3fr iiq kdc mrw jxl jp2 j2k jpx jxr psd psb xcf "
        "svg svgz eps ai ico tga exr hdr dds dcm fits qoi heics avifs",
    )
)
CONVERT: Final = "convert them to JPEG or PNG"


@cache
def readable_suffixes() -> tuple[str, ...]:
    """The suffixes that are read here; HEIC if its library is installed."""
    return (*READ, *HEIC) if find_spec("pillow_heif") is not None else READ


def is_unsupported(name: str) -> bool:
    """Whether a file's name is that of an image in a format that is not read here."""
    lower = name.lower()
    return not lower.endswith(readable_suffixes()) and lower.endswith((*HEIC, *UNREAD))


def describe_remedy(names: Iterable[str]) -> str:
    """What to do about image files that are not read."""
    lower = [name.lower() for name in names]
    heic = [name.endswith(HEIC) for name in lower]
    return "; ".join([*([f"HEIC: {HEIC_EXTRA}"] if any(heic) else []), *([] if heic and all(heic) else [CONVERT])])


MAX_PIXELS: Final = 178_956_970  # Pillow's limit for bombs, too: 0.7 GB decoded
MAX_BYTES: Final = USUAL * MAX_PIXELS  # of memory that decoding one image may take
RUNS: Final = 1 << 22  # pixels of a run-length BMP, which Pillow unpacks in Python; ...
RUN_BYTES: Final = 1 << 21  # ... and bytes of its file
SAMPLE_FORMAT: Final = 339
BLOCK: Final = 1 << 20  # pixels scaled at a time
PREMULTIPLIED: Final = {"La": "LA", "RGBa": "RGBA"}  # Pillow has no direct conversion from these
# By EXIF's orientations from 2 on.
TURNS: Final = "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"


Reserve: TypeAlias = Callable[[int], object]


class EncodedImage:
    """An image whose header has been read: its size is known, and its pixels are not decoded yet."""

    __slots__ = ("failed", "image", "orientation", "size")

    def __init__(
        self, data: bytes | NDArray[np.uint8], *, max_pixels: int = MAX_PIXELS, reserve: Reserve | None = None
    ) -> None:
        """BadImage if this is not a supported image, or has more than `max_pixels` pixels. `reserve` is called with the
        number of bytes that decoding will take, before they are allocated; it may wait, or raise."""
        self.failed = ""
        if isinstance(data, np.ndarray):
            grey = data.ndim == 2 or (data.ndim == 3 and data.shape[2] == 1)
            if data.dtype != np.uint8 or not (grey or (data.ndim == 3 and data.shape[2] in (3, 4))) or not data.size:
                form = f"{data.dtype} {list(data.shape)}"
                raise BadImage(f"an array of {form}; an image is uint8 [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]")
            pixels = np.ascontiguousarray(data.reshape(data.shape[:2]) if grey else data[:, :, :3])
            self.image, self.orientation = Image.fromarray(pixels), UPRIGHT
        else:
            self.image, self.orientation = open_decoder(data, max_pixels, reserve or (lambda _: None))
        width, height = self.image.size
        self.size: Pair = (width, height) if self.orientation >= 5 else (height, width)  # (H, W) when upright

    def rgb(self, scale: int = 1) -> Image.Image:
        """The decoded image, upright, with three channels of 8 bits. With `scale` 2, 4 or 8, a JPEG is decoded at about
        that fraction of its size, in much less time; other images are decoded in full. The size of the result tells
        which. Decodes only once: a second call returns the result of the first, at the first call's scale."""
        if self.failed:  # Pillow would return what a failed decoder left behind
            raise BadImage(self.failed)
        image = self.image
        try:
            if scale > 1 and isinstance(image, JpegImageFile):
                image.draft("RGB", (max(1, image.width // scale), max(1, image.height // scale)))
            elif isinstance(image, PngImageFile) and isinstance(image.fp, io.BytesIO):
                check_png(image.fp.getvalue())
            image.load()
            return turn_upright(to_rgb(image), self.orientation)
        except Exception as error:
            self.failed = describe_failure(error, image.format, "pixels")
            raise BadImage(self.failed) from None


def upright_rgb(image: Image.Image) -> Image.Image:
    """Converts any Pillow image by the same rules: turned by EXIF, 16-bit and float scaled, transparency dropped."""
    with refuse_failures(image.format, "pixels"):
        image.load()  # some formats have EXIF after the pixels; TIFF is turned here
        return turn_upright(to_rgb(image), find_orientation(image.info))


def open_decoder(data: bytes, max_pixels: int, reserve: Reserve) -> tuple[ImageFile, int]:
    """Opens the decoder of a file, without running it; returns it with the orientation."""
    kind = detect_format(data)
    with refuse_failures(kind, "header"):
        _, content, orientation, size = read_header(data)
    if kind in ("GIF", "TIFF"):  # here Pillow's own limit warns on the way
        max_pixels = min(max_pixels, Image.MAX_IMAGE_PIXELS or max_pixels)
    if size is not None:
        reserve(check_size(kind, size, len(data), max_pixels))
    with refuse_failures(kind, "header"):
        image = DECODERS[kind](io.BytesIO(content))
    if image.tile and image.tile[0][0] == "bmp_rle":  # which Pillow unpacks in Python, pixel by pixel
        max_pixels = min(max_pixels, RUNS)
        if len(data) > RUN_BYTES:
            raise BadImage(f"a run-length BMP of {len(data):,} bytes, of at most {RUN_BYTES:,}; save it again as PNG")
    takes = check_size(kind, image.size, len(data), max_pixels)
    if size is None:
        reserve(takes)
    return image, find_orientation(image.info) if kind in ("WEBP", "AVIF") else orientation


def open_avif(file: io.BytesIO) -> ImageFile:
    """Opens an AVIF; Pillow reports irot and imir as an orientation."""
    if not features.check("avif"):
        raise BadImage("AVIF, which this build of Pillow does not read: pip install --upgrade pillow")
    return AvifImageFile(file)


def open_heic(file: io.BytesIO) -> ImageFile:
    """Opens a HEIC; libheif turns the image itself."""
    try:
        library: Any = import_module("pillow_heif")
    except ImportError:
        raise BadImage(f"HEIC, which needs an extra: {HEIC_EXTRA}") from None
    return library.HeifImageFile(file)


# The classes themselves rather than Image.open: no other decoder can run, and no MPO or warning logic interferes.
OPENERS: Final = JpegImageFile, PngImageFile, WebPImageFile, GifImageFile, BmpImageFile, TiffImageFile, PpmImageFile
DECODERS: Final[dict[str, Callable[[io.BytesIO], ImageFile]]] = dict(
    zip(FORMATS, (*OPENERS, open_avif, open_heic), strict=True)
)


@contextmanager
def refuse_failures(kind: str | None, part: str) -> Generator[None]:
    """Turns any error in the "header" or the "pixels" of a file into BadImage, with a message of our own."""
    try:
        yield
    except Exception as error:
        raise BadImage(describe_failure(error, kind, part)) from None


def describe_failure(error: Exception, kind: str | None, part: str) -> str:
    """Describes in one short line why a decoder failed on the "header" or the "pixels" of a file."""
    if isinstance(error, BadImage):
        return str(error)
    what = kind or "image"
    if isinstance(error, MemoryError):
        return f"{what} that takes more memory than is available"
    if "truncated" in str(error) or isinstance(error, EOFError):
        return f"truncated {what}: it ends within its {part}"
    return f"unreadable {what}: its {part} cannot be decoded; the file is damaged, or of a rare variety"


def turn_upright(image: Image.Image, orientation: int) -> Image.Image:
    if orientation == UPRIGHT:
        return image
    upright = image.transpose(Image.Transpose[TURNS[orientation - 2]])
    for key in TURNING:  # so that it is not turned again
        upright.info.pop(key, None)
    return upright


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts a loaded image to RGB; returns it as it is if it is RGB already."""
    if image.mode == "RGB":
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(eight_bits(image)).convert("RGB")
    if "transparency" in image.info:  # dropped; Pillow would convert it, and warn
        image = image.copy()
        del image.info["transparency"]
    if image.mode in PREMULTIPLIED:
        image = image.convert(PREMULTIPLIED[image.mode])
    return image.convert("RGB")


def eight_bits(image: Image.Image) -> NDArray[np.uint8]:
    """Scales one channel of 16 or 32 bits, or of floats, to 8 bits. Values that the format declares as 16 bits are
    divided by 257, floats within [0, 1] are multiplied by 255, and all others are scaled by their own range. NaN
    becomes the darkest value, infinities the ends of the range."""
    values = np.asarray(image)
    if isinstance(image, TiffImageFile) and image.mode == "I" and image.tag_v2.get(SAMPLE_FORMAT, (1,))[0] == 1:
        values = values.view(np.uint32)  # Pillow has no unsigned mode of 32 bits
    with np.errstate(invalid="ignore"):  # a signalling NaN
        finite = np.isfinite(values)
        if not finite.any():
            raise BadImage("none of its pixels is a finite number")
        one = values.flat[int(finite.argmax())]
        low, high = (float(find(values, where=finite, initial=one)) for find in (np.min, np.max))
    if values.dtype.kind in "iu" and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    elif values.dtype.kind == "f" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    gain = 255 / (high - low) if high > low else 0.0
    flat, out = values.reshape(-1), np.empty(values.size, np.uint8)
    for start in range(0, flat.size, BLOCK):
        with np.errstate(invalid="ignore"):
            part = flat[start : start + BLOCK].astype(np.float64)
        part = np.nan_to_num(part, nan=low, posinf=high, neginf=low)
        out[start : start + BLOCK] = np.rint((part - low) * gain)
    return out.reshape(values.shape)


BIT_DEPTH: Final = 24  # where a PNG says how many bits a value has
WIDENED: Final = {2: 85, 4: 17}  # by which Pillow multiplies grey values of so few bits


def read_mask(data: "bytes | NDArray[np.uint8]") -> NDArray[np.uint8]:
    """The class index of every pixel [H, W], upright. BadImage unless it is a PNG, or uint8 array, with one channel of
    whole numbers up to 255."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 2 or not data.size:
            raise BadImage(f"an array of {data.dtype} {list(data.shape)}; a mask is uint8 [H, W]")
        return np.array(data, order="C")  # which may be read-only, or a view with steps of its own
    if detect_format(data) != "PNG":
        raise BadImage(f"{detect_format(data)}; a mask is a PNG of class indices")
    encoded = EncodedImage(data)
    assert isinstance(encoded.image, PngImageFile)
    with refuse_failures("PNG", "pixels"):
        check_png(data)
        encoded.image.load()
    mode = encoded.image.mode
    if mode not in ("1", "L", "P", "I") and not mode.startswith("I;16"):
        raise BadImage(f"PNG in colour ({mode}); a mask has one channel of class indices, or a palette")
    values = np.asarray(turn_upright(encoded.image, encoded.orientation))
    if values.dtype != np.bool_ and int(values.max()) > 255:
        raise BadImage(f"the value {int(values.max())}; class indices go up to 254, and 255 means ignored")
    return values.astype(np.uint8) // np.uint8(WIDENED.get(data[BIT_DEPTH], 1) if mode == "L" else 1)
