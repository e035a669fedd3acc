"""The preprocessing that travels with the weights: from a picture to the pixels a network was trained on."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from vitrail.core.errors import ConfigError, unknown
from vitrail.core.shapes import Pair, pair

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
Triple: TypeAlias = tuple[float, float, float]

HALF: Triple = (0.5, 0.5, 0.5)  # pixels to [-1, 1]: all of Google's weights
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Resize, crop, normalise. With `resize` the shorter side goes there and the centre is cut out; without it the
    picture goes straight to `image`, whatever its aspect, as the reference evaluates."""

    image: Pair = (224, 224)
    resize: int | None = None
    interpolation: Interpolation = "bilinear"
    mean: Triple = HALF
    std: Triple = HALF

    def __post_init__(self) -> None:
        if self.interpolation not in get_args(Interpolation):
            raise unknown("interpolation", str(self.interpolation), get_args(Interpolation))
        if self.resize is not None and self.resize < min(self.image):
            raise ConfigError(f"resize={self.resize} is smaller than the crop {self.image}")
        if not all(value > 0 for value in self.std):
            raise ConfigError(f"std={self.std} must be above 0")

    def __call__(self, picture: "Image") -> "Tensor":
        """One picture to normalised pixels [3, H, W]."""
        from torchvision.transforms.v2 import functional as F  # heavy: loaded when a picture is there

        mode = F.InterpolationMode.BICUBIC if self.interpolation == "bicubic" else F.InterpolationMode.BILINEAR
        resize: Any = F.resize  # takes pictures too, whatever its annotation says
        size = list(self.image) if self.resize is None else [self.resize]
        resized = resize(picture.convert("RGB"), size, interpolation=mode)
        pixels = F.pil_to_tensor(F.center_crop(resized, list(self.image))).float() / 255
        return F.normalize(pixels, list(self.mean), list(self.std))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Preprocessing":
        """What `to_dict` wrote, checked."""
        try:
            resize = data["resize"]
            return Preprocessing(
                image=pair(data["image"]),
                resize=None if resize is None else int(resize),
                interpolation=data["interpolation"],
                mean=triple(data["mean"]),
                std=triple(data["std"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"incomplete preprocessing: {error!r}") from None


def triple(values: Any) -> Triple:
    red, green, blue = (float(value) for value in values)
    return (red, green, blue)
