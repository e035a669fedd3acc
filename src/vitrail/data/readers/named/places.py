"""Where the files of a set lie: as they were downloaded, or unpacked in the layout that people have on disk."""

import gzip
import os
import secrets
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Final

from vitrail.core.errors import DataError, reason_of
from vitrail.core.storage import replacing

PIECE: Final = 1 << 20


class Absent(Exception):
    """None of these is in the folder. Whoever opens a set by name turns it into what to get and where to put it."""

    def __init__(self, root: Path, names: tuple[str, ...]) -> None:
        super().__init__(f"none of {', '.join(names)} in {root}")
        self.root, self.names = root, names


def present(root: Path, *names: str) -> Path:
    """The first of these names that is there."""
    for name in names:
        if (root / name).exists():
            return root / name
    raise Absent(root, names)


def unpacked(root: Path, folder: str, *archives: str) -> Path:
    """The folder; where only one of its archives is there, that is unpacked beside it first, whole or not at all.

    An archive may hold the folder or its contents.
    """
    target = root / folder
    if target.exists():
        return target
    archive = present(root, *archives) if archives else None
    if archive is None:
        raise Absent(root, (folder,))
    temporary = root / f".vitrail-{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir()
        extract(archive, temporary)
        held = temporary / folder
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():  # another process may have been quicker
            os.replace(held if held.exists() else temporary, target)
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked in {root} ({error.strerror or error}); unpack it to {target} yourself, "
            "or give a folder that can be written"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def extract(archive: Path, into: Path) -> None:
    """A tar or zip file. Names that lead out of the folder, links to elsewhere and devices are refused."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(into)  # drops .. and leading slashes by itself
        else:
            with tarfile.open(archive) as opened:
                opened.extractall(into, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{archive} is damaged or cut short ({reason_of(error)}); download it again") from None


def inflated(root: Path, name: str) -> Path:
    """The file; where only name.gz is there, that is unpacked beside it first, whole or not at all."""
    path = root / name
    if path.exists():
        return path
    packed = present(root, f"{name}.gz")
    try:
        with gzip.open(packed) as source, replacing(path) as file:
            shutil.copyfileobj(source, file, PIECE)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{packed} is damaged or cut short ({reason_of(error)}); download it again") from None
    except OSError as error:
        raise DataError(
            f"{packed} cannot be unpacked ({error.strerror or error}); unpack it to {path} yourself, "
            "or give a folder that can be written"
        ) from None
    return path


def read_text(path: Path) -> str:
    """A small text file; what is no UTF-8 in it survives as a file name would."""
    try:
        return path.read_text("utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
