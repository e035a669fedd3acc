"""Masks as they are stored: class indices, never scaled and never looked up in a palette."""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL.PngImagePlugin import PngImageFile

from vitrail.core.errors import BadPicture
from vitrail.data.decode.headers import check_png, format_of
from vitrail.data.decode.picture import Picture, reason, turned

BIT_DEPTH: Final = 24  # where a PNG says how many bits a value has
WIDENED: Final = {2: 85, 4: 17}  # by what Pillow multiplies grey values of so few bits


def read_indices(data: "bytes | NDArray[np.uint8]") -> NDArray[np.uint8]:
    """The class index of every pixel [H, W], upright. BadPicture where this is no PNG, or uint8 array, of one channel
    of whole numbers up to 255."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 2 or not data.size:
            raise BadPicture(f"an array of {data.dtype} {list(data.shape)}; a mask is uint8 [H, W]")
        return np.array(data, order="C")  # which may be read-only, or a view with steps of its own
    if format_of(data) != "PNG":
        raise BadPicture(f"{format_of(data)}; a mask is a PNG of class indices")
    picture = Picture(data)
    assert isinstance(picture.image, PngImageFile)
    try:
        check_png(data)
        picture.image.load()
    except Exception as error:
        raise BadPicture(reason(error, "PNG", "pixels")) from None
    mode = picture.image.mode
    if mode not in ("1", "L", "P", "I") and not mode.startswith("I;16"):
        raise BadPicture(f"PNG in colour ({mode}); a mask has one channel of class indices, or a palette")
    values = np.asarray(turned(picture.image, picture.orientation))
    if values.dtype != np.bool_ and int(values.max()) > 255:
        raise BadPicture(f"the value {int(values.max())}; class indices go up to 254, and 255 counts for nothing")
    return values.astype(np.uint8) // np.uint8(WIDENED.get(data[BIT_DEPTH], 1) if mode == "L" else 1)
