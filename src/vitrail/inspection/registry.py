"""What an inspection can show, kind by kind: from a network and images to the parts of a page.

given = Given(model=model, images=images, pixels=pixels, names=names, crowd=batches)
parts = [KINDS[name].make(given) for name in KINDS if KINDS[name].obstacle(given) is None]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vitrail.inspection.context import InspectionContext
from vitrail.inspection.page import InspectionSection
from vitrail.inspection.sections_attention import (
    make_distance,
    make_entropy,
    make_faithfulness,
    make_gradcam,
    make_gradient,
    make_heads,
    make_layers,
    make_rollout,
)
from vitrail.inspection.sections_learned import (
    make_cka,
    make_features,
    make_filters,
    make_norms,
    make_positions,
    make_similarity,
)

NO_TOKENS: Final = "a ResNet has no tokens and no attention between them"
COMPARED: Final = 16  # images below which CKA is noise


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionKind:
    """How a part is made, and what it takes."""

    make: Callable[[InspectionContext], InspectionSection]
    tokens: bool = True  # needs a transformer
    classes: bool = False  # needs a head
    pictures: bool = True
    resnet: bool = False  # is for ResNets alone

    def obstacle(self, given: InspectionContext) -> str | None:
        """Why it cannot be made of this network; none where it can."""
        config: Any = given.model.config
        if self.tokens and not given.transformer:
            return NO_TOKENS
        if self.resnet and given.transformer:
            return "it is for ResNets; a transformer has rollout and gradient-weighted rollout"
        if self.classes and not given.classes:
            return "this network has no head, so no classes"
        if self.make is make_faithfulness and (not given.has_classes or given.classes < 2):
            return "it follows the probability of a class among others, and this network gives none"
        if self.make is make_positions and config.position in ("none", "relative"):
            return f"a network with position={config.position!r} has no embedding for each place"
        if self.make is make_cka and given.count < COMPARED:
            return f"it compares images with each other and says little below {COMPARED}; name a data set, too"
        if self.make is make_filters and config.channels not in (1, 3):
            return f"filters over {config.channels} channels have no colours"
        return None


KINDS: Final[dict[str, SectionKind]] = {
    "rollout": SectionKind(make=make_rollout),
    "gradcam": SectionKind(make=make_gradcam, tokens=False, classes=True, resnet=True),
    "layers": SectionKind(make=make_layers),
    "heads": SectionKind(make=make_heads),
    "gradient": SectionKind(make=make_gradient, classes=True),
    "faithfulness": SectionKind(make=make_faithfulness, tokens=False, classes=True),
    "filters": SectionKind(make=make_filters, tokens=False, pictures=False),
    "positions": SectionKind(make=make_positions, pictures=False),
    "distance": SectionKind(make=make_distance),
    "entropy": SectionKind(make=make_entropy),
    "norms": SectionKind(make=make_norms),
    "features": SectionKind(make=make_features),
    "similarity": SectionKind(make=make_similarity),
    "cka": SectionKind(make=make_cka),
}
