"""What a server says of attention, for later families: registers and further class tokens are no patches."""

import base64

import numpy as np
import pytest
import torch

from tests.lanes import rest_slow
from tests.models.tiny import FAMILIES, VARIANTS, awake, images
from vitrail.inspection.layer_taps import iterate_layers
from vitrail.inspection.rollout import rollout
from vitrail.models.vit_config import ViTConfig
from vitrail.serve.served_model import compute_attention


@pytest.mark.parametrize("name", rest_slow(FAMILIES, "dinov3", "two class tokens", "siglip", "sam"))
def test_maps_have_a_row_for_the_class_token_and_for_each_patch(name: str) -> None:
    config = VARIANTS[name]
    assert isinstance(config, ViTConfig)
    network, image = awake(config), images(config, batch=1)
    answer = compute_attention(network, image, 1)
    flat = rollout(network, image).flatten()
    np.testing.assert_allclose(answer["rollout"], (flat / flat.max()).numpy(), atol=1e-6)
    rows = config.class_token + config.patches
    maps = np.frombuffer(base64.b64decode(answer["maps"]), np.uint8).reshape(config.heads, rows, config.patches)
    *_, last = iterate_layers(network, image)
    weights = last.attention[0, :, :, config.prefix :]
    shown = weights[:, config.prefix :]
    if config.class_token:
        shown = torch.cat([weights[:, : config.class_tokens].mean(1, keepdim=True), shown], dim=1)
    np.testing.assert_allclose(maps / 255, (shown / shown.amax(-1, keepdim=True)).numpy(), atol=0.002)
    assert answer["class_token"] is config.class_token
