"""Before the start: what a task says of its targets."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.train.tiny import MODEL, tiny_run
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.tasks.segmentation.task import SEGMENTATION, Segmentation
from vitrail.train.config import Data, Run
from vitrail.train.data import open_splits
from vitrail.train.dry_run import dry_run


def masked_run(folder: Path) -> Run:
    """On six images with masks, of which the last is of another size than its image."""
    for at in range(6):
        image = np.random.default_rng(at).integers(0, 255, (8, 8, 3), np.uint8)
        mask = np.zeros((8, 8 if at < 5 else 4), np.uint8)
        mask[4:] = 1
        for name, content in (("images", image), ("masks", mask)):
            (folder / name).mkdir(exist_ok=True)
            Image.fromarray(content).save(folder / name / f"{at}.png")
    data = Data(source=str(folder), watch="none", test="none", workers=0)
    return tiny_run(model=MODEL, objective=Segmentation(), mix=Mix(), data=data, batch=2, micro=2, steps=7, average=0.0)


def test_masks_that_cannot_be_used_are_named_and_classes_are_those_of_pixels(tmp_path: Path) -> None:
    run = masked_run(tmp_path)
    found = dry_run(run, open_splits(run.data, SEGMENTATION), World(device=torch.device("cpu")))
    assert "2 classes of pixels" in found.figures["images"]
    bad = next(text for text in found.warnings if "cannot be read" in text)
    assert bad.startswith("1 of 6 ")
    assert "5.png: mask" in bad
    assert found.run.model.has_patch_head
