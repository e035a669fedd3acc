"""The shape legend of the whole house, in the paper's letters.

B batch   C H W image channels, height, width   P patch side   N patches   T tokens (N plus class token and registers)
D width   M MLP width   k heads   L depth   K classes   G grid (rows, columns)

A size is always (height, width); `pair` makes one from an int.
"""

from typing import TypeAlias

Pair: TypeAlias = tuple[int, int]


def pair(size: int | Pair | list[int]) -> Pair:
    """(height, width) from one number or two."""
    if isinstance(size, int):
        return (size, size)
    height, width = size
    return (int(height), int(width))


def times(size: Pair) -> str:
    """ "14x14", as the paper writes sizes."""
    return f"{size[0]}x{size[1]}"
