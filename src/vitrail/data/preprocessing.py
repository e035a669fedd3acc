"""The preprocessing that travels with the weights: from a picture to the pixels a network was trained on."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from vitrail.core.errors import ConfigError, unknown
from vitrail.core.shapes import Pair, pair
from vitrail.data.decode.picture import upright_rgb

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
Triple: TypeAlias = tuple[float, float, float]

HALF: Triple = (0.5, 0.5, 0.5)  # pixels to [-1, 1]: all of Google's weights
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)

LARGEST: Final = 1 << 26  # pixels that a resized picture may have before the crop; a strip of 1 x 5000 has more


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Resize, crop, normalise. With `resize` the shorter side goes there and the centre is cut out; without it the
    picture goes straight to `image`, whatever its aspect, as the reference evaluates. With `antialias` a picture is
    shrunk as Pillow does it, every pixel counted; without, as TensorFlow does, which the reference was trained in: the
    nearest pixels only, from half-pixel centres."""

    image: Pair = (224, 224)
    resize: int | None = None
    interpolation: Interpolation = "bilinear"
    mean: Triple = HALF
    std: Triple = HALF
    antialias: bool = True

    def __post_init__(self) -> None:
        if self.interpolation not in get_args(Interpolation):
            raise unknown("interpolation", str(self.interpolation), get_args(Interpolation))
        if self.resize is not None and self.resize < min(self.image):
            raise ConfigError(f"resize={self.resize} is smaller than the crop {self.image}")
        if not all(value > 0 for value in self.std):
            raise ConfigError(f"std={self.std} must be above 0")

    def __call__(self, picture: "Image") -> "Tensor":
        """One picture to normalised pixels [3, H, W]."""
        return self.normalise(self.pixels(picture))

    def pixels(self, picture: "Image") -> "Tensor":
        """One picture, of whatever mode and turned however, resized and cropped: uint8 [3, H, W]."""
        from torchvision.transforms.v2 import functional as F  # heavy: loaded when a picture is there

        mode = F.InterpolationMode.BICUBIC if self.interpolation == "bicubic" else F.InterpolationMode.BILINEAR
        resize: Any = F.resize  # takes pictures too, whatever its annotation says
        size = list(self.image) if self.resize is None else [self.resize]
        upright = upright_rgb(picture)
        if self.resize is not None and self.resize**2 * max(upright.size) > LARGEST * min(upright.size):
            height, width = self.image
            return F.pil_to_tensor(upright.resize((width, height), pillow(self.interpolation), self.centre(upright)))
        if self.antialias:
            return F.pil_to_tensor(F.center_crop(resize(upright, size, interpolation=mode), list(self.image)))
        # In floats: the kernel for bytes exists on some processors only, and rounds otherwise.
        resized = resize(F.pil_to_tensor(upright).float(), size, interpolation=mode, antialias=False)
        return F.center_crop(resized, list(self.image)).round().clamp(0, 255).byte()

    def centre(self, picture: "Image") -> tuple[float, float, float, float]:
        """The box of a picture that resizing and cropping would leave, without making the rest: for one so long that
        the rest would fill the memory."""
        assert self.resize is not None
        scale = min(picture.size) / self.resize
        height, width = (side * scale for side in self.image)
        left, top = (picture.width - width) / 2, (picture.height - height) / 2
        return (left, top, left + width, top + height)

    def normalise(self, pixels: "Tensor") -> "Tensor":
        """uint8 [..., 3, H, W], on whatever device, to the floats that the network takes."""
        import torch

        mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (self.mean, self.std))
        return (pixels.float() / 255).sub_(mean).div_(std)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Preprocessing":
        """What `to_dict` wrote, checked."""
        try:
            resize = data["resize"]
            antialias = data.get("antialias", True)  # older files know no other
            if not isinstance(antialias, bool):
                raise TypeError(f"antialias={antialias!r}")
            return Preprocessing(
                image=pair(data["image"]),
                resize=None if resize is None else int(resize),
                interpolation=data["interpolation"],
                mean=triple(data["mean"]),
                std=triple(data["std"]),
                antialias=antialias,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"incomplete preprocessing: {error!r}") from None


def pillow(interpolation: Interpolation) -> Any:
    from PIL import Image

    return Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR


def triple(values: Any) -> Triple:
    red, green, blue = (float(value) for value in values)
    return (red, green, blue)
