"""What a network looks at (4.5, D.7, D.8): filters, positions, attention, and maps on the images.

    from vitrail import inspection, load

    model = load("ViT-B_16.npz")
    maps = inspection.rollout(model, images)  # [B, rows, columns]

Images are prepared images [B, C, H, W], as `model.card.preprocessing` makes them. Models stay as they are: in their
mode, without gradients, with their fused attention.
"""

# Not lazy as the package itself: four functions are named as their modules, and a module that is imported later would
# take the name.
from vitrail.inspection.cka import cka, layer_cka
from vitrail.inspection.distance import attention_distance, attention_entropy, distance_matrix
from vitrail.inspection.faithfulness import FaithfulnessCurves, faithfulness_curves, random_maps
from vitrail.inspection.layer_taps import TokenLayout, iterate_layers, get_token_layout
from vitrail.inspection.overlay import overlay
from vitrail.inspection.rollout import class_attention, grad_cam, gradient_rollout, combine_layers, rollout, rollout_by_layer
from vitrail.inspection.weights_and_features import (
    feature_colours,
    filter_components,
    distance_correlation,
    patch_features,
    patch_similarity,
    position_similarity,
    row_column_score,
    token_norms,
)

__all__ = [
    "Curves",
    "Tokens",
    "attention_distance",
    "attention_entropy",
    "cka",
    "class_attention",
    "colours",
    "curves",
    "distance_matrix",
    "filters",
    "grad_cam",
    "gradient_rollout",
    "joined",
    "layer_cka",
    "near_far",
    "overlay",
    "patch_features",
    "patch_similarity",
    "position_similarity",
    "random_maps",
    "rollout",
    "rollout_by_layer",
    "row_column_score",
    "stream",
    "token_norms",
    "tokens_of",
]
