"""A classifier of your own classes without training: frozen features and least squares in closed form (Section 4.1).

    python examples/fit_in_seconds.py

It generates 200 images of eight colours in photos/train and 100 in photos/test, one subfolder per class, fits a last
layer to the features of the first and scores it on the second. The result is a network in a file, colours.safetensors,
which `vitrail predict`, `serve` and `export` take. `vitrail fit` is the same as a command; a folder of yours works as
well.
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
    fitted = vitrail.fit("vitrail-cifar10", "photos")  # the penalty is the best of 30 on images that are held out
    print(f"{fitted.pictures} images of {len(colours.classes)} classes in {time.perf_counter() - start:.1f} s")
    print(f"{fitted.scored.top1.value:.1%} of {fitted.scored.top1.count} test images right")

    vitrail.save(fitted.model, "colours.safetensors")
    predictor = vitrail.Predictor("colours.safetensors")
    print("colours.safetensors says", predictor("photos/test/pink/0.png", topk=2).to_dict()["top"])


if __name__ == "__main__":
    main()
