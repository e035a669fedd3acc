"""Do two networks see the same? Features of one that was trained and of one that was not, compared twice.

    python examples/compare_networks.py

By their neighbours: of how many pictures do the five nearest ones tell the class? And by linear CKA: 1 where two sets
of features differ by a rotation and a scale alone, near 0 where they have nothing in common.
"""

import torch

import vitrail
from vitrail.evaluation.knn import classify, nearest
from vitrail.inspection.cka import cka

PICTURES = 240


def main() -> None:
    torch.manual_seed(0)
    fresh = vitrail.create_model("ViT-Mini/4", image_size=32, classes=10)
    networks = {
        "trained on CIFAR-10": vitrail.predictor("vitrail-cifar10"),
        "the same, at 48 px": vitrail.predictor("vitrail-cifar10", image_size=48),
        "fresh weights": vitrail.Predictor(fresh),
    }
    colours = vitrail.open_collection("shapes/colour").split("train")
    pictures = [colours.picture(at).rgb() for at in range(PICTURES)]
    labels = torch.tensor([colours.labels[at][0] for at in range(PICTURES)])
    features = {name: network.features(pictures) for name, network in networks.items()}  # [N, D] each

    half = PICTURES // 2
    for name, found in features.items():
        near = nearest(found[:half], found[half:], k=5)
        right = classify(near, labels[:half], classes=8, k=5) == labels[half:]
        print(f"{name:20} {right.float().mean():.0%} of {half} colours right by 5 neighbours")

    alike = cka([torch.stack(list(features.values()))])  # [3, 3]
    names = list(features)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        print(f"CKA {alike[a, b]:.2f}   {names[a]} / {names[b]}")


if __name__ == "__main__":
    main()
