"""Section 3.2 by hand: a new resolution and new classes for a trained network, compared with `vitrail.load`.

    python examples/swap_head_and_resize.py

The patch size stays the same, so a larger image gives a longer sequence. All weights work for any length except the
position embeddings, which are interpolated in 2-D by the location of each patch in the image. The head is replaced by a
new one that is initialised to zero.
"""

import torch
from torch import nn

import vitrail


def main() -> None:
    model = vitrail.load("vitrail-cifar10")
    table = model.state_dict()["position.tables.0.table"]
    print(f"trained: {model.config.image[0]} px, {model.config.grid} patches, positions {list(table.shape)}")

    # By hand: 8x8 positions become 12x12. A class token's row would stay as it is; this network has none.
    square = table.unflatten(1, (8, 8)).permute(0, 3, 1, 2)  # [1, D, 8, 8]
    square = nn.functional.interpolate(square.double(), (12, 12), mode="bilinear", align_corners=True)
    by_hand = square.flatten(2).transpose(1, 2).to(table)  # [1, 144, D]

    # With the library: by its function, and as part of `vitrail.load`.
    resized = vitrail.resize_position(table, (8, 8), (12, 12))
    larger = vitrail.load("vitrail-cifar10", image_size=48, classes=3)
    loaded = larger.state_dict()["position.tables.0.table"]
    print(f"resized: {larger.config.image[0]} px, {larger.config.grid} patches, positions {list(loaded.shape)}")
    same = torch.equal(by_hand, resized) and torch.equal(resized, loaded)
    print(f"by hand, by the library's function and by load the same: {same}")

    with torch.inference_mode():
        logits = larger(torch.randn(2, 3, 48, 48))
    head = larger.get_classifier()
    print(f"new head: {head}, all zero: {not head.weight.any()}; so every logit is 0: {logits.tolist()}")

    # Only the head is new: the encoder keeps what it has learned, and gives one token per patch of a 48 px image.
    with torch.inference_mode():
        z = larger.forward_features(torch.randn(1, 3, 48, 48))
    print(f"tokens after the last layer: {list(z.shape)}")


if __name__ == "__main__":
    main()
