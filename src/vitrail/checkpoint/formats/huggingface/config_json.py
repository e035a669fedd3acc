"""Reads a Hugging Face `config.json`, with checked types, and writes one from our fields."""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, cast

from vitrail.checkpoint.formats.key_table import TensorShapes
from vitrail.core.errors import MismatchedWeights
from vitrail.core.text import Pair, pair
from vitrail.models.vit_config import ViTConfig

NAME: Final = "huggingface"
# Their name of an activation: ours.
ACTIVATIONS: Final = {
    "gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh",
    "quick_gelu": "quick",
}  # fmt: skip
WRITTEN: Final = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
# Our fields: the key that states each, and transformers' default.
Keys: TypeAlias = Mapping[str, tuple[str, Any]]


class ConfigReader:
    """The values of a config.json, next to the tensors that they describe."""

    def __init__(self, shapes: TensorShapes, values: dict[str, Any], prefix: str = ""):
        self.shapes, self.values, self.prefix = shapes, values, prefix

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name in the base model, whose names all begin with `prefix`."""
        return self.prefix + name in self.shapes

    def refuse(self, cause: str) -> MismatchedWeights:
        return MismatchedWeights(f"{self.shapes.path}: {cause}")

    def fields(self, keys: Keys) -> dict[str, Any]:
        """The fields that the keys state, each read as the type of its default."""
        found = {field: self._field(field, *known) for field, known in keys.items()}
        if "image" in found:  # pixels beyond the last patch are not used
            cut = tuple(side - side % max(patch, 1) for side, patch in zip(found["image"], found["patch"], strict=True))
            found["image"] = self.shapes.image or (cut if min(cut) else found["image"])
        return found

    def _field(self, field: str, name: str, default: Any) -> Any:
        if field in ("image", "patch"):
            return self.size(name, default)
        if field == "gelu":
            return self.activation(name, default)
        if isinstance(default, bool):
            return self.flag(name, default)
        if isinstance(default, int):
            return self.integer(name, default, least=int(field not in ("registers", "upscale")))
        return self.number(name, default)

    def integer(self, name: str, default: int, least: int = 1) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not least <= value < 2**20:
            raise self.refuse(f"config.json says {name}={value!r}, expected a whole number above {least - 1}")
        return value

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self.values.get(name, default)
        numbers = cast(list[object], value) if isinstance(value, list | tuple) else [None]
        if not all(type(number) is int for number in numbers):
            raise self.refuse(f"config.json says {name}={value!r}, expected a list of whole numbers")
        return tuple(cast(list[int], numbers))

    def size(self, name: str, default: int) -> Pair:
        value = self.values.get(name, default)
        numbers = [value, value] if type(value) is int else value
        sides = cast(list[int], numbers) if isinstance(numbers, list) else []
        if [type(side) for side in sides] != [int, int] or not 0 < min(sides) <= max(sides) < 2**16:
            raise self.refuse(f"config.json says {name}={value!r}, expected one or two whole numbers above 0")
        return pair(sides)

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**31:
            raise self.refuse(f"config.json says {name}={value!r}, expected a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self.refuse(f"config.json says {name}={value!r}, expected true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.refuse(f"{name} {value!r} is not a GELU; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def require(self, name: str, *allowed: object, default: object = None) -> None:
        """Raises an error for a value that none of our fields can represent."""
        if (value := self.values.get(name, allowed[0] if default is None else default)) not in allowed:
            listed = " or ".join(repr(one) for one in allowed)
            raise self.refuse(f"config.json says {name}={value!r}; vitrail's network has {listed}")


def write_fields(c: ViTConfig, keys: Keys) -> dict[str, Any]:
    """The keys of a config.json that state these fields."""
    return {name: write_value(field, getattr(c, field)) for field, (name, _) in keys.items()}


def write_value(field: str, value: Any) -> Any:
    if field in ("image", "patch"):
        return value[0] if value[0] == value[1] else list(value)
    return WRITTEN[value] if field == "gelu" else value
