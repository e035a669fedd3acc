"""The kinds of section that an inspection can show.

given = InspectionContext(model=model, images=images, pixels=pixels, names=names, crowd=batches, count=len(images))
sections = [kind.make(given) for kind in KINDS.values() if kind.obstacle(given) is None]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vitrail.inspection import sections_attention, sections_learned
from vitrail.inspection.context import InspectionContext
from vitrail.inspection.page import InspectionSection

NO_TOKENS: Final = "a ResNet has no tokens and no attention between them"
COMPARED: Final = 16  # images below which CKA is noise


def check_probabilities(given: InspectionContext) -> str | None:
    if given.has_classes and given.classes > 1:
        return None
    return "it follows the probability of one class among several, and this network has none"


def check_positions(given: InspectionContext) -> str | None:
    position: str = getattr(given.model.config, "position", "")
    return f"position={position!r} has no embedding per place" if position in ("none", "relative") else None


def check_count(given: InspectionContext) -> str | None:
    too_few = f"it compares images with each other and needs at least {COMPARED}; add a data set"
    return too_few if given.count < COMPARED else None


def check_channels(given: InspectionContext) -> str | None:
    config: Any = given.model.config
    return None if config.channels in (1, 3) else f"filters over {config.channels} channels have no colours"


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionKind:
    """How a section is made, and what it needs."""

    make: Callable[[InspectionContext], InspectionSection]
    tokens: bool = True  # needs a transformer
    classes: bool = False  # needs a head
    pictures: bool = True  # needs images
    resnet: bool = False  # is for ResNets only
    check: Callable[[InspectionContext], str | None] | None = None

    def obstacle(self, given: InspectionContext) -> str | None:
        """Why it cannot be made for this network; None if it can."""
        if self.tokens and not given.transformer:
            return NO_TOKENS
        if self.resnet and given.transformer:
            return "it is for ResNets; a transformer has rollout and gradient-weighted rollout"
        if self.classes and not given.classes:
            return "this network has no head, so no classes"
        return None if self.check is None else self.check(given)


KINDS: Final[dict[str, SectionKind]] = {
    "rollout": SectionKind(make=sections_attention.make_rollout),
    "gradcam": SectionKind(make=sections_attention.make_gradcam, tokens=False, classes=True, resnet=True),
    "layers": SectionKind(make=sections_attention.make_layers),
    "heads": SectionKind(make=sections_attention.make_heads),
    "gradient": SectionKind(make=sections_attention.make_gradient, classes=True),
    "faithfulness": SectionKind(
        make=sections_attention.make_faithfulness, tokens=False, classes=True, check=check_probabilities
    ),
    "filters": SectionKind(make=sections_learned.make_filters, tokens=False, pictures=False, check=check_channels),
    "positions": SectionKind(make=sections_learned.make_positions, pictures=False, check=check_positions),
    "distance": SectionKind(make=sections_attention.make_distance),
    "entropy": SectionKind(make=sections_attention.make_entropy),
    "norms": SectionKind(make=sections_learned.make_norms),
    "features": SectionKind(make=sections_learned.make_features),
    "similarity": SectionKind(make=sections_learned.make_similarity),
    "cka": SectionKind(make=sections_learned.make_cka, check=check_count),
}
