"""The shape legend of the whole house, in the paper's letters.

B batch   C H W image channels, height, width   P patch side   N patches   T tokens (N plus class token and registers)
D width   M MLP width   k heads   L depth   K classes   G grid (rows, columns)

A size is always (height, width); `pair` makes one from an int.
"""

from typing import Final, TypeAlias

from vitrail.core.errors import ConfigError

Pair: TypeAlias = tuple[int, int]
LARGEST_SIDE: Final = 4096  # pixels of an image for a network; one of 20000 x 20000 fills the memory of any machine


def pair(size: int | Pair | list[int]) -> Pair:
    """(height, width) from one number or two."""
    if isinstance(size, int):
        return (size, size)
    if len(size) != 2:
        raise ConfigError(f"image or patch size {size!r} must be one number or (height, width)")
    return (int(size[0]), int(size[1]))


def format_size(size: Pair) -> str:
    """ "14x14", as the paper writes sizes."""
    return f"{size[0]}x{size[1]}"
