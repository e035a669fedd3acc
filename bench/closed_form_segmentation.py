"""Oxford-IIIT Pets segmented in closed form: least squares on the patch tokens of a frozen network.

    python bench/closed_form_segmentation.py --data FOLDER --weights deit_tiny_patch16_224.safetensors
    python bench/closed_form_segmentation.py ... --images 300 --image-size 320

FOLDER holds pets_trainval.tar and pets_test.tar: KEY.webp (or .jpg) and KEY.trimap.png, where 1 is the pet, 2 the
background and 3 the border. There are two variants: the pet with its border against the
background, and with the border ignored. Prints the IoU of the pet over all pixels of the test images, as the network
sees them, with an interval from resampling images, and the seconds that the sums and the solution take, apart from the
network's.
"""

import argparse
import io
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitrail.checkpoint.find_weights import find_weights
from vitrail.evaluation.intervals import bootstrap
from vitrail.evaluation.scoring import make_subject
from vitrail.tasks.segmentation.closed_form import FittedSegmenter, fit_segmenter

SPLITS = {"train": "pets_trainval.tar", "test": "pets_test.tar"}
VARIANTS = {"pet and border": [255, 1, 0, 1], "border ignored": [255, 1, 0, 255]}  # class indices by trimap value


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with the two tar files")
    parser.add_argument("--weights", required=True, help="a ViT: a file, or NAME:TAG")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=0, help="images of each split; 0 for all")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    bundle = find_weights(args.weights)
    about = make_subject(args.weights, bundle, torch.device(args.device), image_size=args.image_size)
    for variant in args.variants:
        with tempfile.TemporaryDirectory() as place:
            write_folder(args.data, Path(place), VARIANTS[variant], args.images)
            begun = time.perf_counter()
            made = fit_segmenter(about.network, Path(place), device=args.device, name=args.weights)
            print_result(variant, made, time.perf_counter() - begun)
    return 0


def write_folder(data: Path, folder: Path, values: list[int], most: int) -> None:
    """Images and masks of class indices, as `vitrail fit` reads them."""
    for split, name in SPLITS.items():
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        with tarfile.open(data / name) as tar:
            members = {member.name: member for member in tar.getmembers()}
            keys = sorted(key.removesuffix(".trimap.png") for key in members if key.endswith(".trimap.png"))
            for key in keys[:: max(len(keys) // most, 1)][:most] if most else keys:
                suffix = next(end for end in (".webp", ".jpg") if key + end in members)
                content, trimap = (tar.extractfile(members[key + end]) for end in (suffix, ".trimap.png"))
                assert content is not None
                assert trimap is not None
                (folder / split / "images" / f"{key}{suffix}").write_bytes(content.read())
                mask = np.array(values, np.uint8)[np.asarray(Image.open(io.BytesIO(trimap.read())))]
                Image.fromarray(mask).save(folder / split / "masks" / f"{key}.png")
    (folder / "classes.txt").write_text("background\npet\n")


def print_result(variant: str, made: FittedSegmenter, seconds: float) -> None:
    assert made.scored is not None
    score = made.scored.score
    images = score.images
    assert images is not None
    (interval,) = bootstrap(
        lambda weights: np.array([(weights @ images.both[:, 1]) / (weights @ images.either[:, 1])]), score.count
    )
    assert interval is not None
    print(
        f"{variant}: IoU of the pet {score.ious[1]:.4f} ({interval.low:.4f}–{interval.high:.4f}), "
        f"mIoU {score.miou:.4f}, pixels {score.pixel_accuracy:.4f}; {made.pictures:,} images to learn from, "
        f"{score.count:,} scored; sums and solution {made.seconds:.1f} s, everything {seconds:.0f} s; "
        f"l2 {made.head.penalty:g}, offsets {[round(one, 3) for one in made.head.offsets.tolist()]}",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
