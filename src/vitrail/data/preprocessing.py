"""The preprocessing that travels with the weights: from an image to the pixels a network was trained on.

`tf.image.resize` as Google's pipelines call it, in its own arithmetic: half-pixel centres, without antialiasing.

`bilinear` looks at the two nearest pixels along each axis, however many become one (vit_jax, BiT, big_vision's crops);
`area` is the mean over what becomes one pixel (big_vision's `resize_small`).
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
    """uint8 [C, H, W] to levels, float32 [C, h, w]: left + (right - left) · share, first across and then down."""
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
    """uint8 [C, H, W] to levels, float64 [C, h, w]: each the mean of a rectangle, its fractions of pixels included."""
    import torch

    def shares(old: int, new: int) -> "Tensor":
        edges = torch.arange(new + 1, dtype=torch.float64) * (old / new)
        ruler = torch.arange(old, dtype=torch.float64)
        covered = torch.minimum(edges[1:, None], ruler + 1) - torch.maximum(edges[:-1, None], ruler)
        return covered.clamp_(min=0) / (old / new)

    down, across = shares(pixels.shape[1], size[0]), shares(pixels.shape[2], size[1])
    return down @ (pixels.double() @ across.T)


def truncate_levels(levels: "Tensor") -> "Tensor":
    """Levels to bytes as `tf.cast` does it: what is behind the point is cut off, but for what rounding left there."""
    return (levels + 1e-5).clamp(0, 255).byte()


Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
Resampling: TypeAlias = Literal["bilinear", "bicubic", "area"]
Fit: TypeAlias = Literal["squash", "pad"]
Triple: TypeAlias = tuple[float, float, float]
ChannelValues: TypeAlias = tuple[float, ...]  # one for each channel: three for colours, one for grey

HALF: Triple = (0.5, 0.5, 0.5)  # pixels to [-1, 1]: all of Google's weights
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)

LUMA: Final = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R 601): what Pillow takes for grey

ALLOWED: Final = 1024  # pixels a side that any network's images may have; beyond them ...
STRETCH: Final = 8  # ... at most this many times the network's own side, and before a crop this many times the crop's
EXTREME: Final = 1e6  # means and deviations lie within this and, for deviations, its inverse
LARGEST: Final = 1 << 26  # pixels that a resized image may have before the crop; a strip of 1 x 5000 has more


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Resize, crop, normalise. With `resize`, the shorter side is resized to it and the centre is cropped. Without it,
    the image is resized straight to `image`, whatever its aspect, as the reference evaluates; or, with the fit "pad",
    it keeps its aspect and gets black borders at the right or at the bottom, as EoMT evaluates. With `antialias` an
    image is shrunk as Pillow does it, every pixel counted; without, as TensorFlow does, which the reference was trained
    in: the nearest pixels only, from half-pixel centres. The interpolation "area" is big_vision's evaluation, whole:
    the mean over what becomes one pixel, levels cut off to bytes, and a window that is rounded its way. Images are
    always read in colour; where `mean` and `std` are of one channel, their luma is what the network sees."""

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
        """ConfigError where images would come out absurdly large for a network made for `image`, or in other channels
        than it takes. Colours are let through: older files have them, whatever the network."""
        if self.channels not in (channels, 3):
            raise ConfigError(f"preprocessing has {self.channels} channels for a network of {channels}")
        for ours, theirs in zip(self.image, image, strict=True):
            if ours > max(ALLOWED, STRETCH * theirs):
                fact = f"preprocessing makes images of {format_size(self.image)} for a network of {format_size(image)}"
                raise ConfigError(f"{fact}; at most {STRETCH} times its side, or {ALLOWED}, is allowed")

    @property
    def channels(self) -> int:
        """How many the network takes."""
        return len(self.mean)

    def adapt_channels(self, channels: int) -> "Preprocessing":
        """For weights that were brought to another number of channels: one takes the means over the old ones, more take
        the old ones in turn, as their kernels do (models/resampling/patch_kernels.py)."""
        if channels == self.channels:
            return self
        old = (self.mean, self.std)
        if channels == 1:
            mean, std = ((sum(values) / len(values),) for values in old)
        else:
            mean, std = (tuple(values[at % len(values)] for at in range(channels)) for values in old)
        return replace(self, mean=mean, std=std)

    def __call__(self, image: "Image") -> "Tensor":
        """One image to normalised pixels [C, H, W]."""
        return self.normalise(self.pixels(image))

    def pixels(self, image: "Image") -> "Tensor":
        """One image, of whatever mode and turned however, resized and cropped: uint8 [3, H, W]."""
        from torchvision.transforms.v2 import functional as F  # heavy: loaded when an image is there

        mode = F.InterpolationMode.BICUBIC if self.interpolation == "bicubic" else F.InterpolationMode.BILINEAR
        resize: Any = F.resize  # takes images too, whatever its annotation says
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
        # In floats: the kernel for bytes exists on some processors only, and rounds otherwise.
        if self.interpolation == "bilinear":
            resized = resize_bilinear(F.pil_to_tensor(upright), (tall, wide))
        else:
            resized = resize(F.pil_to_tensor(upright).float(), size, interpolation=mode, antialias=False)
        return place(resized).round().clamp(0, 255).byte()

    def geometry(self, whole: Pair) -> "Geometry":
        """Where the pixels come from, in an upright image of size `whole`."""
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
        """What the crop leaves of one side of the resized image: where it begins, how long it is, and what is added
        before and after where that is too short."""
        if wanted > resized:
            return 0, resized, (wanted - resized) // 2, (wanted - resized + 1) // 2
        first = (resized - wanted) // 2 if self.interpolation == "area" else round((resized - wanted) / 2)
        return first, wanted, 0, 0

    def _is_strip(self, whole: Pair) -> bool:
        """Whether the resized image would be too large to make."""
        return self.resize is not None and self.resize**2 * max(whole) > LARGEST * min(whole)

    def resized(self, whole: Pair) -> Pair:
        """What the whole image is resized to: torchvision's rule, which cuts the longer side off to pixels; or
        big_vision's, which rounds it."""
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
        """The box of an image of size `whole` that resizing and cropping would leave, without making the rest: for one
        so long that the rest would fill the memory. Left, top, right, bottom."""
        assert self.resize is not None
        scale = min(whole) / self.resize
        height, width = (side * scale for side in self.image)
        left, top = (whole[1] - width) / 2, (whole[0] - height) / 2
        return (left, top, left + width, top + height)

    def view_box(self, whole: Pair) -> tuple[float, float, float, float]:
        """The box of an image of size `whole` that the network's pixels show: left, top, right, bottom. It goes beyond
        the image where they have borders."""
        if self.resize is not None:
            return self.centre(whole)
        tall, wide = self.resized(whole)
        return (0.0, 0.0, whole[1] * (self.image[1] / wide), whole[0] * (self.image[0] / tall))

    def normalise(self, pixels: "Tensor") -> "Tensor":
        """uint8 [..., 3, H, W], or of as many channels as the network takes, on whatever device, to its floats."""
        return normalise_pixels(pixels, *self.channel_tensors(pixels.device))

    def channel_tensors(self, device: "torch.device | str | None" = None) -> "tuple[Tensor, Tensor]":
        """Mean and standard deviation as [C, 1, 1] tensors, for `normalise_pixels`."""
        import torch

        mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (self.mean, self.std))
        return mean, std

    def to_dict(self) -> dict[str, Any]:
        """Without the fit where it is the usual one, which files of earlier versions do not have."""
        data = asdict(self)
        return {name: value for name, value in data.items() if name != "fit" or value != "squash"}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Preprocessing":
        """Restores what `to_dict` wrote, checked."""
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
    """uint8 [..., 3, H, W] to the floats that a network takes; mean and std are [C, 1, 1] on the same device. One
    channel is the luma of three."""
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
    """Finite numbers; a file may write 224 as 224.0."""
    numbers = cast("list[Any]", values) if isinstance(values, list | tuple) else []
    if not numbers or not all(is_number(value) for value in numbers):
        raise ConfigError(f"{quote_value(values)} must be finite numbers")
    return tuple(int(value) if value == int(value) else value for value in numbers)


def is_number(value: object) -> bool:
    """A finite int or float, neither True nor False."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def quote_value(value: object) -> str:
    """A value from a file, quoted on one line."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
