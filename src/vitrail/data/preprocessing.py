"""The preprocessing stored with the weights: turns an image into the pixels a network was trained on.

Includes `tf.image.resize` as Google's pipelines call it, in the same arithmetic: half-pixel centres, no antialiasing.
`bilinear` reads the two nearest pixels along each axis, whatever the scale (vit_jax, BiT, big_vision's crops); `area`
is the mean over the source area of each output pixel (big_vision's `resize_small`).
"""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, get_args

from vitrail.core.errors import ConfigError, unknown_name
from vitrail.core.text import LARGEST_SIDE, Pair, format_size
from vitrail.data.decode.image import upright_rgb

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from vitrail.data.targets import Geometry


def resize_bilinear(pixels: "Tensor", size: Pair) -> "Tensor":
    """Resizes uint8 [C, H, W] to float32 levels [C, h, w]: left + (right - left) · share, first across, then down."""
    import torch

    def between(old: int, new: int) -> "tuple[Tensor, Tensor, Tensor]":
        at = (torch.arange(new) + 0.5) * (old / new) - 0.5
        low = at.floor()
        return low.clamp(min=0).long(), at.ceil().clamp(max=old - 1).long(), at - low

    left, right, across = between(pixels.shape[2], size[1])
    upper, lower, down = between(pixels.shape[1], size[0])

    def row(which: "Tensor") -> "Tensor":
        some = pixels[:, which]
        first = some[:, :, left].float()
        return first + (some[:, :, right].float() - first) * across

    top = row(upper)
    return top + (row(lower) - top) * down[:, None]


def resize_area(pixels: "Tensor", size: Pair) -> "Tensor":
    """Resizes uint8 [C, H, W] to float64 levels [C, h, w], each the exact mean over a rectangle of the image."""
    import torch

    def shares(old: int, new: int) -> "Tensor":
        edges = torch.arange(new + 1, dtype=torch.float64) * (old / new)
        ruler = torch.arange(old, dtype=torch.float64)
        covered = torch.minimum(edges[1:, None], ruler + 1) - torch.maximum(edges[:-1, None], ruler)
        return covered.clamp_(min=0) / (old / new)

    down, across = shares(pixels.shape[1], size[0]), shares(pixels.shape[2], size[1])
    return down @ (pixels.double() @ across.T)


def truncate_levels(levels: "Tensor") -> "Tensor":
    """Truncates levels to bytes, as `tf.cast` does. A small margin absorbs rounding errors below a whole number."""
    return (levels + 1e-5).clamp(0, 255).byte()


Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
Resampling: TypeAlias = Literal["bilinear", "bicubic", "area"]
Fit: TypeAlias = Literal["squash", "pad"]
Triple: TypeAlias = tuple[float, float, float]
ChannelValues: TypeAlias = tuple[float, ...]  # one per channel: three for colour, one for grey

HALF: Triple = (0.5, 0.5, 0.5)  # maps pixels to [-1, 1], as for all of Google's weights
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)

LUMA: Final = (0.299, 0.587, 0.114)  # weights of red, green and blue (ITU-R 601), which Pillow also uses for grey

ALLOWED: Final = 1024  # pixels per side that the images of any network may have; beyond them ...
STRETCH: Final = 8  # ... at most this many times the network's own side, and before a crop this many times the crop's
EXTREME: Final = 1e6  # bound on means and deviations; deviations are also at least its inverse
LARGEST: Final = 1 << 26  # pixels that a resized image may have before the crop; a strip of 1 x 5000 has more


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Resizes, crops and normalises. With `resize`, the shorter side is resized to it and the centre is cropped.
    Without it, the image is resized directly to `image`, whatever its aspect, as the reference evaluates; with the fit
    "pad" it keeps its aspect and gets black borders on the right or at the bottom, as EoMT evaluates.

    With `antialias` images are shrunk as in Pillow, where every pixel counts; without, as in TensorFlow, with which the
    reference was trained: only the nearest pixels count, from half-pixel centres. The interpolation "area" reproduces
    big_vision's evaluation completely: the mean over the source area of each pixel, levels truncated to bytes, and its
    rounding of the window. Images are always read in colour; if `mean` and `std` have one channel, the network sees
    their luma."""

    image: Pair = (224, 224)
    resize: int | None = None
    interpolation: Resampling = "bilinear"
    mean: ChannelValues = HALF
    std: ChannelValues = HALF
    antialias: bool = True
    fit: Fit = "squash"

    def __post_init__(self) -> None:
        if len(self.image) != 2 or not all(type(side) is int and 1 <= side <= LARGEST_SIDE for side in self.image):
            raise ConfigError(f"image={quote_value(self.image)} must be two whole numbers from 1 to {LARGEST_SIDE}")
        least, most = min(self.image), max(ALLOWED, STRETCH * min(self.image))
        if self.resize is not None and not (type(self.resize) is int and least <= self.resize <= most):
            crop = f"a whole number from {least}, the crop's shorter side, to {most}"
            raise ConfigError(f"resize={quote_value(self.resize)} must be {crop}")
        if self.interpolation not in get_args(Resampling):
            raise unknown_name("interpolation", str(self.interpolation)[:60], get_args(Resampling))
        for name, values, low in (("mean", self.mean, -EXTREME), ("std", self.std, 1 / EXTREME)):
            if not values or not all(is_number(value) and low <= value <= EXTREME for value in values):
                raise ConfigError(f"{name}={quote_value(values)} must be numbers from {low:g} to {EXTREME:g}")
        if len(self.mean) != len(self.std):
            raise ConfigError(f"mean has {len(self.mean)} channels and std {len(self.std)}; give one number for each")
        if type(self.antialias) is not bool:
            raise ConfigError(f"antialias={quote_value(self.antialias)} must be true or false")
        if self.fit not in get_args(Fit):
            raise unknown_name("fit", str(self.fit)[:60], get_args(Fit))
        if self.resize is not None and self.fit != "squash":
            raise ConfigError(f"fit={self.fit} shows the whole image, and resize={self.resize} a part of it; set one")

    def check_fit(self, image: Pair, channels: int = 3) -> None:
        """Raises ConfigError if images would be absurdly large for a network made for `image`, or have a different
        number of channels. Three channels always pass, because older files have them for any network."""
        if self.channels not in (channels, 3):
            raise ConfigError(f"preprocessing has {self.channels} channels for a network of {channels}")
        for ours, theirs in zip(self.image, image, strict=True):
            if ours > max(ALLOWED, STRETCH * theirs):
                fact = f"preprocessing makes images of {format_size(self.image)} for a network of {format_size(image)}"
                raise ConfigError(f"{fact}; at most {STRETCH} times its side, or {ALLOWED}, is allowed")

    @property
    def channels(self) -> int:
        """The number of channels that the network takes."""
        return len(self.mean)

    def adapt_channels(self, channels: int) -> "Preprocessing":
        """Adapts to weights with another number of channels: a single channel takes the means over the old ones, more
        channels take the old ones in turn, as their kernels do (models/resampling/patch_kernels.py)."""
        if channels == self.channels:
            return self
        old = (self.mean, self.std)
        if channels == 1:
            mean, std = ((sum(values) / len(values),) for values in old)
        else:
            mean, std = (tuple(values[at % len(values)] for at in range(channels)) for values in old)
        return replace(self, mean=mean, std=std)

    def __call__(self, image: "Image") -> "Tensor":
        """Converts an image to normalised pixels [C, H, W]."""
        return self.normalise(self.pixels(image))

    def pixels(self, image: "Image") -> "Tensor":
        """Resizes and crops an image of any mode and EXIF orientation: uint8 [3, H, W]."""
        from torchvision.transforms.v2 import functional as F  # heavy: loaded with the first image

        mode = F.InterpolationMode.BICUBIC if self.interpolation == "bicubic" else F.InterpolationMode.BILINEAR
        resize: Any = F.resize  # its annotation leaves out images
        upright = upright_rgb(image)
        whole = (upright.height, upright.width)
        tall, wide = self.resized(whole)
        size = [tall, wide] if self.resize is None else [self.resize]
        height, width = self.image

        def place(done: Any) -> Any:
            if self.resize is None:
                borders: Any = F.pad
                return borders(done, [0, 0, width - wide, height - tall])
            return F.center_crop(done, [height, width])

        if self._is_strip(whole):
            box = self.centre(whole)
            return F.pil_to_tensor(upright.resize((width, height), pillow_filter(self.interpolation), box))
        if self.interpolation == "area":  # big_vision's resize_small and central_crop
            done = truncate_levels(resize_area(F.pil_to_tensor(upright), (tall, wide)))
            if self.resize is None:
                return place(done)
            top, left = (done.shape[1] - height) // 2, (done.shape[2] - width) // 2
            return done[:, top : top + height, left : left + width]
        if self.antialias:
            return F.pil_to_tensor(place(resize(upright, size, interpolation=mode)))
        # In floats: the kernel for bytes exists only on some processors, and rounds differently.
        if self.interpolation == "bilinear":
            resized = resize_bilinear(F.pil_to_tensor(upright), (tall, wide))
        else:
            resized = resize(F.pil_to_tensor(upright).float(), size, interpolation=mode, antialias=False)
        return place(resized).round().clamp(0, 255).byte()

    def geometry(self, whole: Pair) -> "Geometry":
        """Returns where the pixels come from in an upright image of size `whole`."""
        from vitrail.data.targets import Geometry  # loads torch

        if self.resize is None:
            tall, wide = self.resized(whole)
            pad = (0, 0, self.image[1] - wide, self.image[0] - tall)
            return Geometry(whole=whole, box=(0, 0, *whole), inner=(tall, wide), pad=pad)
        if self._is_strip(whole):
            left, top, right, bottom = self.centre(whole)
            return Geometry(whole=whole, box=(top, left, bottom - top, right - left), inner=self.image)
        resized = self.resized(whole)
        windows = (self._window(*sides) for sides in zip(resized, self.image, strict=True))
        (top, tall, above, below), (left, wide, before, after) = windows
        down, across = whole[0] / resized[0], whole[1] / resized[1]
        box = (top * down, left * across, tall * down, wide * across)
        return Geometry(whole=whole, box=box, inner=(tall, wide), pad=(before, above, after, below))

    def _window(self, resized: int, wanted: int) -> tuple[int, int, int, int]:
        """Crops one side of the resized image: returns the start and length of the window, and the padding before and
        after it if the side is too short."""
        if wanted > resized:
            return 0, resized, (wanted - resized) // 2, (wanted - resized + 1) // 2
        first = (resized - wanted) // 2 if self.interpolation == "area" else round((resized - wanted) / 2)
        return first, wanted, 0, 0

    def _is_strip(self, whole: Pair) -> bool:
        """Whether the image is so long that the resized image would be too large."""
        return self.resize is not None and self.resize**2 * max(whole) > LARGEST * min(whole)

    def resized(self, whole: Pair) -> Pair:
        """Returns the size that the whole image is resized to: by torchvision's rule, which truncates the longer side
        to whole pixels, or by big_vision's, which rounds it."""
        if self.resize is None:
            scale = min(self.image[0] / whole[0], self.image[1] / whole[1])
            return (
                self.image
                if self.fit == "squash"
                else (max(round(whole[0] * scale), 1), max(round(whole[1] * scale), 1))
            )
        if self.interpolation == "area":
            scale = self.resize / min(whole)
            return (round(whole[0] * scale), round(whole[1] * scale))
        other = int(self.resize * max(whole) / min(whole))
        return (self.resize, other) if whole[0] <= whole[1] else (other, self.resize)

    def centre(self, whole: Pair) -> tuple[float, float, float, float]:
        """Returns the box (left, top, right, bottom) of an image of size `whole` that remains after resizing and
        cropping. For very long images, resizing this box alone avoids a resized image that would fill the memory."""
        assert self.resize is not None
        scale = min(whole) / self.resize
        height, width = (side * scale for side in self.image)
        left, top = (whole[1] - width) / 2, (whole[0] - height) / 2
        return (left, top, left + width, top + height)

    def view_box(self, whole: Pair) -> tuple[float, float, float, float]:
        """Returns the box (left, top, right, bottom) of an image of size `whole` that the network sees. With borders it
        extends beyond the image."""
        if self.resize is not None:
            return self.centre(whole)
        tall, wide = self.resized(whole)
        return (0.0, 0.0, whole[1] * (self.image[1] / wide), whole[0] * (self.image[0] / tall))

    def normalise(self, pixels: "Tensor") -> "Tensor":
        """Normalises uint8 [..., 3, H, W], or with as many channels as the network takes, on any device."""
        return normalise_pixels(pixels, *self.channel_tensors(pixels.device))

    def channel_tensors(self, device: "torch.device | str | None" = None) -> "tuple[Tensor, Tensor]":
        """Returns mean and standard deviation as [C, 1, 1] tensors, for `normalise_pixels`."""
        import torch

        mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (self.mean, self.std))
        return mean, std

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain values. The default fit is left out, as in files of earlier versions."""
        data = asdict(self)
        return {name: value for name, value in data.items() if name != "fit" or value != "squash"}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Preprocessing":
        """Restores and checks what `to_dict` wrote."""
        try:
            image, resize = data["image"], data["resize"]
            image = cast("Pair", read_numbers(image if isinstance(image, list | tuple) else [image, image]))
            resize = None if resize is None else cast("int", read_numbers([resize])[0])
            mean, std = (tuple(map(float, read_numbers(data[name]))) for name in ("mean", "std"))
            newer = {"antialias": data.get("antialias", True), "fit": data.get("fit", "squash")}
            rest = {"interpolation": data["interpolation"], **newer}
            return Preprocessing(image=image, resize=resize, mean=mean, std=std, **rest)
        except KeyError as error:
            raise ConfigError(f"incomplete preprocessing: {error.args[0]} is missing") from None
        except ConfigError as error:
            raise ConfigError(f"preprocessing: {error}") from None


def normalise_pixels(pixels: "Tensor", mean: "Tensor", std: "Tensor") -> "Tensor":
    """Normalises uint8 [..., 3, H, W] to floats for a network; mean and std are [C, 1, 1] on the same device. A network
    of one channel gets the luma of three."""
    shares, wanted, given = pixels.float() / 255, mean.shape[0], pixels.shape[-3]
    if wanted != given:
        if (wanted, given) != (1, 3):
            raise ConfigError(f"images of {given} channels for a network of {wanted}; give it tensors of its own")
        red, green, blue = (weight * shares.narrow(-3, at, 1) for at, weight in enumerate(LUMA))
        shares = red + green + blue
    return (shares - mean) / std


def pillow_filter(interpolation: Resampling) -> Any:
    from PIL import Image

    return Image.Resampling["BOX" if interpolation == "area" else interpolation.upper()]


def read_numbers(values: Any) -> tuple[float, ...]:
    """Checks a list of finite numbers, and turns whole ones into ints: a file may write 224 as 224.0."""
    numbers = cast("list[Any]", values) if isinstance(values, list | tuple) else []
    if not numbers or not all(is_number(value) for value in numbers):
        raise ConfigError(f"{quote_value(values)} must be finite numbers")
    return tuple(int(value) if value == int(value) else value for value in numbers)


def is_number(value: object) -> bool:
    """Whether a value is a finite int or float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def quote_value(value: object) -> str:
    """Quotes a value from a file on one line."""
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
