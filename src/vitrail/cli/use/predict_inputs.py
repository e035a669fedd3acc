"""Sorts the words of `vitrail predict` into weights and images, and lists the images in folders and on stdin."""

import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from vitrail.checkpoint.find_weights import FOLDER_FILES
from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS, is_bundled
from vitrail.core.atomic_files import similar_paths
from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.core.text import pluralise
from vitrail.data.dataset import StringArray
from vitrail.data.decode.headers import detect_format
from vitrail.data.decode.image import is_unsupported, readable_suffixes
from vitrail.data.readers.folder import describe_unread, has_image_suffix, is_folder, list_entries

STDIN: Final = "-"
WEIGHTS: Final = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt")
UNREAD: Final = (".pdf", ".mp4")
OVERLAY: Final = ".overlay.png"  # suffix of the drawings that predict writes next to its files
PAUSE_S: Final = 0.2  # pause of the writer to stdin after which the names so far are processed
CHUNK: Final = 1 << 16


class ImageFile(NamedTuple):
    """An image file, and its path relative to the folder it was found in."""

    path: str
    inside: str


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Splits words into weights and images. The first word is weights, unless it is an image, a folder without weights,
    or -; then the bundled weights are used."""
    first, rest = words[0], list(words[1:])
    late = next((word for word in rest if word.lower().endswith(WEIGHTS)), None)
    if late is not None:
        raise ConfigError(f"{late} looks like weights, which come first: vitrail predict {late} IMAGE...")
    if not is_weights(first):
        return DEFAULT_WEIGHTS, list(words)
    if not rest:
        raise ConfigError(f"{first} is weights, but no images follow; name files or folders, or -")
    return first, rest


def is_weights(word: str) -> bool:
    """Whether the first word stands for weights. ConfigError if it stands for nothing."""
    if word == STDIN or has_image_suffix(word) or is_unsupported(word) or word.lower().endswith(UNREAD):
        return False
    if is_bundled(word) or word.lower().endswith(WEIGHTS):
        return True
    if os.path.isdir(word):
        return any(os.path.isfile(os.path.join(word, name)) for name in FOLDER_FILES)
    if os.path.isfile(word):
        return not is_image_file(word)
    if os.path.exists(word):
        raise ConfigError(f"{word} is a pipe or a device; name a regular file")
    if ":" in word:  # NAME:TAG
        return True
    kinds = f"weights (a file, a folder, NAME:TAG or {DEFAULT_WEIGHTS}), an image, a folder of images, or - for stdin"
    near = similar_paths(word, DEFAULT_WEIGHTS)
    raise ConfigError(f"{word}: there is no such file or folder; {near}the first word is {kinds}")


def is_image_file(path: str) -> bool:
    """Whether a file's content is an image, whatever its name."""
    try:
        with open(path, "rb") as file:
            detect_format(file.read(CHUNK))
    except (OSError, BadImage):
        return False
    return True


@dataclass(frozen=True, slots=True)
class ImageListing:
    """The images that words stand for, as a compact array of paths: 100,000 of them take a few megabytes."""

    words: tuple[str, ...]
    paths: StringArray
    starts: tuple[int, ...]  # where each word's images begin in `paths`, and the end
    notes: tuple[str, ...]  # on skipped files
    closed: tuple[str, ...]  # folders that could not be read, and why

    @property
    def total(self) -> int | None:
        """The number of images; None if some of them come from stdin."""
        return None if STDIN in self.words else len(self.paths)

    def known_images(self) -> Iterator[ImageFile]:
        """All images except those that stdin will name."""
        return (found for at, word in enumerate(self.words) if word != STDIN for found in self.images_of(at))

    def bursts(self) -> Iterator[Iterable[ImageFile]]:
        """All images in order, in runs that are available without a pause, since names on stdin may come slowly."""
        for at, word in enumerate(self.words):
            if word == STDIN:
                yield from StdinNames().bursts()
            elif at == 0 or self.words[at - 1] == STDIN:
                until = next((i for i in range(at, len(self.words)) if self.words[i] == STDIN), len(self.words))
                yield (found for i in range(at, until) for found in self.images_of(i))

    def images_of(self, at: int) -> Iterator[ImageFile]:
        """The images of one word."""
        word = self.words[at]
        for index in range(self.starts[at], self.starts[at + 1]):
            path = self.paths[index]
            yield ImageFile(path, os.path.basename(path) if path == word else os.path.relpath(path, word))


def list_images(words: Sequence[str], *written: Path | None) -> ImageListing:
    """Lists files as given, and folders recursively in order. Names are read once, now; no file is opened. Overlays and
    subfolders that are `written` to are skipped, as the output of earlier commands."""
    if list(words).count(STDIN) > 1:
        raise ConfigError("- stands for stdin, which can be read once")
    paths, starts, notes, closed, left = list[str](), [0], list[str](), list[str](), list[str]()
    drawn = 0  # overlays
    for word in words:
        if word != STDIN and os.path.isdir(word):
            found, others, unread, shut = walk_folder(word, *written)
            images = [path for path in found if not path.lower().endswith(OVERLAY)]
            paths += images
            if overlays := len(found) - len(images):
                notes.append(f"{word}: skipped {pluralise(overlays, 'overlay')} of earlier predictions (*{OVERLAY})")
                drawn += overlays
            closed += shut
            left += unread
            if unread:
                notes.append(f"{word}: skipped {describe_unread(unread)}")
            if others:
                notes.append(f"{word}: skipped {pluralise(others, 'file')} without an image suffix")
        elif word != STDIN:
            paths.append(word)
        starts.append(len(paths))
    if not paths and STDIN not in words:
        left_out = f"{pluralise(drawn, 'overlay')} of earlier predictions" if drawn else ""
        left_out = left_out or (describe_unread(left) if left else "")
        names = f" but {left_out}" if left_out else f"; names end in {', '.join(readable_suffixes()[:6])}, ..."
        raise DataError(f"{', '.join(words)}: no images found{f'; {closed[0]}' if closed else names}")
    return ImageListing(tuple(words), StringArray(paths), tuple(starts), tuple(notes), tuple(closed))


def walk_folder(root: str, *written: Path | None) -> tuple[list[str], int, list[str], list[str]]:
    """The images below a folder at any depth, the number of other files, image files in unsupported formats, and a line
    for each unreadable folder. A folder that several links lead to is entered once, so loops end."""
    images, unread, closed, others = list[str](), list[str](), list[str](), 0
    below = [folder for folder in written if folder is not None and folder.is_dir() and not folder.samefile(root)]
    seen = {(status.st_dev, status.st_ino) for status in map(os.stat, below)}
    waiting = [root]
    while waiting:
        where = waiting.pop()
        try:
            status = os.stat(where)
            place = (status.st_dev, status.st_ino)
            entries = list_entries(where) if place not in seen else []
        except (OSError, DataError) as error:
            why = f"{where}: the folder cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            closed.append(why)
            continue
        seen.add(place)
        folders: list[str] = []
        for entry in entries:
            if is_folder(entry):
                folders.append(os.path.join(where, entry.name))
            elif has_image_suffix(entry.name):
                images.append(os.path.join(where, entry.name))
            elif is_unsupported(entry.name):
                unread.append(entry.name)
            else:
                others += 1
        waiting += reversed(folders)
    return images, others, unread, closed


class StdinNames:
    """Reads names from stdin, one per line. The writer may be waiting for predictions, so names are passed on as soon
    as no more arrive for a moment."""

    def __init__(self) -> None:
        self.names = self.read()
        self.ended = False

    def bursts(self) -> Iterator[Iterable[ImageFile]]:
        while not self.ended:
            yield self.burst()

    def burst(self) -> Iterator[ImageFile]:
        for name in self.names:
            if name is None:
                return
            if name:
                yield ImageFile(name, os.path.basename(name))
        self.ended = True

    def read(self) -> Iterator[str | None]:
        """Yields names, and None for each pause after one."""
        try:
            descriptor = sys.stdin.fileno()
        except (OSError, AttributeError, ValueError):  # stdin of a notebook or a test, which is not a file
            yield from (line.rstrip("\r\n") for line in sys.stdin or ())
            return
        rest, paused = b"", True
        while True:
            # No thread reads stdin, because a waiting one could not be ended. The wait has a timeout, because an
            # interrupt just before it is handled only after it. On Windows, select cannot wait for a pipe.
            while sys.platform != "win32" and not select.select([descriptor], [], [], PAUSE_S)[0]:
                if not paused:
                    paused = True
                    yield None
            chunk = os.read(descriptor, CHUNK)
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (os.fsdecode(name.rstrip(b"\r")) for name in whole)
            paused = paused and not whole
            if not chunk:
                yield os.fsdecode(rest.rstrip(b"\r"))
                return
