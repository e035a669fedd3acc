"""A classifier for your own classes without training: frozen features and closed-form least squares (Section 4.1).

    python examples/fit_in_seconds.py

Generates 200 images of eight colours in photos/train and 100 in photos/test, one subfolder per class. Then fits a last
layer to the features of the training images and scores it on the test images. The result is an ordinary weight file,
colours.safetensors, which `vitrail predict`, `serve` and `export` accept. `vitrail fit` does the same on the command
line; your own folder works just as well.
"""

import time
from pathlib import Path

import vitrail


def main() -> None:
    colours = vitrail.open_collection("shapes/colour")
    for name, count in (("train", 200), ("test", 100)):
        split = colours.split(name)
        for index in range(count):
            folder = Path("photos", name, colours.classes[split.labels[index][0]])
            folder.mkdir(parents=True, exist_ok=True)
            split.open_image(index).rgb().save(folder / f"{index}.png")

    start = time.perf_counter()
    fitted = vitrail.fit("vitrail-cifar10", "photos")  # the best of 30 penalties on held-out images
    print(f"{fitted.pictures} images of {len(colours.classes)} classes in {time.perf_counter() - start:.1f} s")
    print(f"{fitted.scored.top1.value:.1%} of {fitted.scored.top1.count} test images right")

    vitrail.save(fitted.model, "colours.safetensors")
    predictor = vitrail.Predictor("colours.safetensors")
    print("colours.safetensors says", predictor("photos/test/pink/0.png", topk=2).to_dict()["top"])


if __name__ == "__main__":
    main()
