"""Images lit by where a network looked (Figure 6), each in a file of its own."""

import io
import os
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from torch import Tensor

from vitrail.core.atomic_files import check_writable, replacing
from vitrail.core.errors import ConfigError
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.context import run_in_portions
from vitrail.inspection.layer_taps import require_transformer
from vitrail.inspection.rollout import overlay, rollout
from vitrail.predict.predictor import Predictor
from vitrail.report.page import printable

VIEW_SIZES: Final = (256, 768)  # pixels of the longer side, at least and at most
MAX_NAME: Final = 200  # bytes of a name; file systems take 255


def crop_view(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """The part of an image that the network sees, in the image's own aspect, in a size that one can look at."""
    box = (0.0, 0.0, float(image.width), float(image.height))
    if preprocessing.resize is not None:
        left, top, right, bottom = preprocessing.centre(image)
        box = (max(left, 0.0), max(top, 0.0), min(right, box[2]), min(bottom, box[3]))
    width, height = box[2] - box[0], box[3] - box[1]
    least, most = VIEW_SIZES
    scale = min(max(least / max(width, height), 1.0), most / max(width, height))
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    return image.resize(size, Image.Resampling.BICUBIC, box)


class AttentionImages:
    """The files in a folder. Names are flat, so that none leads out of it, and no two are the same."""

    def __init__(self, folder: Path, asker: Predictor[Any]) -> None:
        require_transformer(asker.network)  # refuses what has no attention
        check_writable(folder / "picture.png")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--attention {folder} is a file; name a folder")
        self.folder, self.asker = folder, asker
        self.taken, self.times = set[str](), Counter[str]()

    def show(self, image: Image.Image) -> Image.Image:
        """The part of an upright image that the network sees, for a person."""
        return crop_view(image, self.asker.preprocessing)

    def maps(self, batch: Tensor) -> Tensor:
        """Where the network looked: uint8 [N, 3, H, W] -> [N, rows, columns]."""
        network = self.asker.network
        return run_in_portions(network, self.asker.normalise(batch), lambda images: rollout(network, images)).cpu()

    def draw(self, inside: str, view: Image.Image, map: Tensor) -> str:
        """Writes an image; its path."""
        file = io.BytesIO()
        Image.fromarray(overlay(np.asarray(view), map)).save(file, "PNG")
        path = self.folder / self.named(inside)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as target:
                target.write(file.getvalue())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror or error}); give another --attention"
            ) from error
        return str(path)

    def named(self, inside: str) -> str:
        """animals/cat.jpg -> animals--cat.jpg.png, and the second one of that name animals--cat.jpg.2.png. The
        suffix is always added: a folder that is drawn into itself keeps its images."""
        name = printable(inside).replace(os.sep, "--").replace("/", "--") or "picture"
        if len(os.fsencode(name)) > MAX_NAME:
            short = os.fsdecode(os.fsencode(name)[: MAX_NAME - 20])
            name = f"{short}-{sha256(os.fsencode(name)).hexdigest()[:16]}"
        while True:
            self.times[name] += 1
            again = self.times[name]
            tried = f"{name}.png" if again == 1 else f"{name}.{again}.png"
            if tried.casefold() not in self.taken:  # some file systems tell no Cat from cat
                self.taken.add(tried.casefold())
                return tried
