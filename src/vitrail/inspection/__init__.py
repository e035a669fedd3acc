"""Inspects what a network looks at (4.5, D.7, D.8): filters, positions, attention, and maps on the images.

    from vitrail import inspection, load

    model = load("ViT-B_16.npz")
    maps = inspection.rollout(model, images)  # [B, rows, columns]

Images are prepared images [B, C, H, W], as `model.card.preprocessing` makes them. Models are not changed: they keep
their mode and their fused attention, and get no gradients.
"""

# isort: off
# Not imported lazily like the package itself: four functions have the names of their modules, and a module that is
# imported later would replace the function.
from vitrail.inspection.layer_taps import TokenLayout, get_token_layout, iterate_layers
from vitrail.inspection.measures import (
    FaithfulnessCurves,
    attention_distance,
    attention_entropy,
    cka,
    distance_matrix,
    faithfulness_curves,
    layer_cka,
    random_maps,
)
from vitrail.inspection.query_masks import query_masks
from vitrail.inspection.rollout import (
    class_attention,
    combine_layers,
    grad_cam,
    gradient_rollout,
    overlay,
    rollout,
    rollout_by_layer,
)
from vitrail.inspection.weights_and_features import (
    distance_correlation,
    feature_colours,
    filter_components,
    patch_features,
    patch_similarity,
    position_similarity,
    row_column_score,
    token_norms,
)

__all__ = [
    "FaithfulnessCurves", "TokenLayout", "attention_distance", "attention_entropy", "cka", "class_attention",
    "combine_layers", "distance_correlation", "distance_matrix", "faithfulness_curves", "feature_colours",
    "filter_components", "get_token_layout", "grad_cam", "gradient_rollout", "iterate_layers", "layer_cka", "overlay",
    "patch_features", "patch_similarity", "position_similarity", "query_masks", "random_maps", "rollout",
    "rollout_by_layer", "row_column_score", "token_norms",
]  # fmt: skip
