"""Grad-CAM (Selvaraju et al.) for the BiT ResNets, which have no attention to look at."""

import torch
from torch import Tensor, nn

from vitrail.core.errors import ConfigError
from vitrail.inspection.tokens import chosen, has_attention, placed, precise
from vitrail.models.backbone import backbone
from vitrail.models.resting import resting


def grad_cam(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """What of the last stage's map speaks for a class (by default the one that the network says): [B, C, H, W] prepared
    -> [B, rows, columns], none below 0.

    max(Σ_c α_c F_c, 0) over the channels F_c of the map behind the last norm, α_c the mean over places of ∂y/∂F_c."""
    if has_attention(model):
        raise ConfigError(f"grad_cam is for ResNets, not for a {type(model).__name__}; take gradient_rollout")
    model = backbone(model)
    if not model.config.classes:
        raise ConfigError("this network has no classes to explain: it has no head")
    with torch.inference_mode(False), resting(model):
        with torch.no_grad():
            found = model.forward_features(placed(images, model))
        with torch.enable_grad():
            found = found.requires_grad_()
            logits = model.forward_head(found)
            picked = logits.gather(1, chosen(logits, classes)[:, None])
            speaks = torch.autograd.grad(picked.sum(), found)[0]
    weight = precise(speaks).mean(dim=(2, 3), keepdim=True)
    return (weight * precise(found.detach())).sum(dim=1).clamp(min=0)
