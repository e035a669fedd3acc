"""--out: predictions as files, in the same tree as their images, each with a drawing for people to look at."""

import io
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from PIL import Image

from vitrail.cli.predict_pictures import ImageFile
from vitrail.core.atomic_files import check_writable, write_file
from vitrail.core.errors import ConfigError
from vitrail.tasks.task import Task

MAX_DRAWING: Final = 1536  # pixels of the longer side of a drawing, at most
OVERLAY: Final = ".overlay.png"
MAX_NAME: Final = 200  # bytes of a name; file systems take 255


def limit_size(image: Image.Image) -> Image.Image:
    """The image, or a smaller copy that is large enough to draw on: batches of photographs would fill the memory."""
    if max(image.size) <= MAX_DRAWING:
        return image
    small = image.copy()
    small.thumbnail((MAX_DRAWING, MAX_DRAWING), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return small


class PredictionFiles:
    """Files in a folder, called as the images are. None is written where images lie, so that none of them is replaced,
    and no two have the same name."""

    def __init__(self, folder: Path, task: Task, images: Iterable[ImageFile]) -> None:
        if not task.has_files:
            raise ConfigError(f"--out {folder}: predictions of {task.name} are not files; --json writes them as text")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {folder} is a file; name a folder")
        check_writable(folder / f"image{OVERLAY}")
        self.folder, self.task = folder, task
        self.taken, self.occupied = set[str](), set[tuple[int, int]]()
        targets = set[str]()
        for found in images:
            self._occupy(found)
            targets.add(os.path.dirname(found.inside))
        for target in targets:
            self._check_free(folder / target)

    def write(self, found: ImageFile, prediction: Any, image: Image.Image) -> dict[str, str]:
        """Writes what the task makes of a prediction; the paths by what they are: "file", "overlay"."""
        content, drawing = self.task.file_of(prediction), self.task.draw(prediction, image)
        suffix = "" if content is None else content[0]
        self._occupy(found)
        name = self._name(found.inside, suffix)
        self._check_free((self.folder / name).parent)
        written = dict[str, str]()
        if content is not None:
            written["file"] = self._write(f"{name}{suffix}", content[1])
        if drawing is not None:
            file = io.BytesIO()
            drawing.save(file, "PNG")
            written["overlay"] = self._write(f"{name}{OVERLAY}", file.getvalue())
        return written

    def _write(self, name: str, content: bytes) -> str:
        path = self.folder / name
        write_file(path, content)
        return str(path)

    def _name(self, inside: str, suffix: str) -> str:
        """animals/cat.jpg -> animals/cat, and the second one of that name animals/cat.2."""
        above, name = os.path.split(inside)
        stem = os.path.splitext(name)[0]
        if len(os.fsencode(stem)) > MAX_NAME:
            short = os.fsencode(stem)[: MAX_NAME - 20].decode("utf-8", "ignore")
            stem = f"{short}-{sha256(os.fsencode(stem)).hexdigest()[:16]}"
        again = 1
        while True:
            tried = os.path.join(above, stem if again == 1 else f"{stem}.{again}")
            both = {f"{tried}{ending}".casefold() for ending in (suffix, OVERLAY)}  # some disks tell no Cat from cat
            if not both & self.taken:
                self.taken |= both
                return tried
            again += 1

    def _occupy(self, found: ImageFile) -> None:
        if (place := identify(os.path.dirname(found.path) or os.curdir)) is not None:
            self.occupied.add(place)

    def _check_free(self, folder: Path) -> None:
        if identify(folder) in self.occupied:
            raise ConfigError(f"--out {self.folder}: {folder} holds images that are read; name another folder")


def identify(folder: str | Path) -> tuple[int, int] | None:
    """What a folder is under any of its names; none where it is not there."""
    try:
        status = os.stat(folder)
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino)
