"""Do two networks represent images in the same way? Compares the features of a trained and an untrained network.

    python examples/compare_networks.py

Two measures are printed. Nearest neighbours: for how many images does a vote of the five nearest give the right class?
Linear CKA: 1 if two sets of features differ only by a rotation and a scale, near 0 if they have nothing in common.
"""

import torch

import vitrail

IMAGES = 240


def main() -> None:
    torch.manual_seed(0)
    fresh = vitrail.create_model("ViT-Mini/4", image_size=32, classes=10)
    networks = {
        "trained on CIFAR-10": vitrail.Predictor("vitrail-cifar10"),
        "the same, at 48 px": vitrail.Predictor("vitrail-cifar10", image_size=48),
        "fresh weights": vitrail.Predictor(fresh),
    }
    colours = vitrail.open_collection("shapes/colour").split("train")
    images = [colours.open_image(index).rgb() for index in range(IMAGES)]
    labels = torch.tensor([colours.labels[index][0] for index in range(IMAGES)])
    features = {name: network.features(images) for name, network in networks.items()}  # [N, D] each

    half = IMAGES // 2
    for name, found in features.items():
        near = vitrail.find_nearest(found[:half], found[half:], k=5)
        votes = labels[near.index].mode(dim=1).values
        print(f"{name:20} {(votes == labels[half:]).float().mean():.0%} of {half} colours right by 5 neighbours")

    alike = vitrail.inspection.cka([torch.stack(list(features.values()))])  # [3, 3]
    names = list(features)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        print(f"CKA {alike[a, b]:.2f}   {names[a]} / {names[b]}")


if __name__ == "__main__":
    main()
