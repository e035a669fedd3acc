"""What an inspection can show, kind by kind: from a network and images to the parts of a page.

given = Given(model=model, images=images, pixels=pixels, names=names, crowd=batches)
parts = [KINDS[name].make(given) for name in KINDS if KINDS[name].obstacle(given) is None]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vitrail.inspection.context import Given
from vitrail.inspection.page import Part
from vitrail.inspection.sections_attention import (
    distance_part,
    entropy_part,
    faithfulness_part,
    gradcam_part,
    gradient_part,
    heads_part,
    layers_part,
    rollout_part,
)
from vitrail.inspection.sections_learned import (
    cka_part,
    features_part,
    filters_part,
    norms_part,
    positions_part,
    similarity_part,
)

TOKENLESS: Final = "a ResNet has no tokens and no attention between them"
COMPARED: Final = 16  # images below which CKA is noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How a part is made, and what it takes."""

    make: Callable[[Given], Part]
    tokens: bool = True  # needs a transformer
    classes: bool = False  # needs a head
    pictures: bool = True
    resnet: bool = False  # is for ResNets alone

    def obstacle(self, given: Given) -> str | None:
        """Why it cannot be made of this network; none where it can."""
        config: Any = given.model.config
        if self.tokens and not given.transformer:
            return TOKENLESS
        if self.resnet and given.transformer:
            return "it is for ResNets; a transformer has rollout and gradient-weighted rollout"
        if self.classes and not given.classes:
            return "this network has no head, so no classes"
        if self.make is faithfulness_part and (not given.has_classes or given.classes < 2):
            return "it follows the probability of a class among others, and this network gives none"
        if self.make is positions_part and config.position in ("none", "relative"):
            return f"a network with position={config.position!r} has no embedding for each place"
        if self.make is cka_part and given.count < COMPARED:
            return f"it compares images with each other and says little below {COMPARED}; name a data set, too"
        if self.make is filters_part and config.channels not in (1, 3):
            return f"filters over {config.channels} channels have no colours"
        return None


KINDS: Final[dict[str, Kind]] = {
    "rollout": Kind(make=rollout_part),
    "gradcam": Kind(make=gradcam_part, tokens=False, classes=True, resnet=True),
    "layers": Kind(make=layers_part),
    "heads": Kind(make=heads_part),
    "gradient": Kind(make=gradient_part, classes=True),
    "faithfulness": Kind(make=faithfulness_part, tokens=False, classes=True),
    "filters": Kind(make=filters_part, tokens=False, pictures=False),
    "positions": Kind(make=positions_part, pictures=False),
    "distance": Kind(make=distance_part),
    "entropy": Kind(make=entropy_part),
    "norms": Kind(make=norms_part),
    "features": Kind(make=features_part),
    "similarity": Kind(make=similarity_part),
    "cka": Kind(make=cka_part),
}
