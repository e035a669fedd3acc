"""What travels with a network, as far as a network needs to know: the checkpoint layer has the real one."""

from typing import Protocol


class Card(Protocol):
    """Class names and the like, which a new head makes untrue."""

    def without_labels(self) -> "Card": ...
