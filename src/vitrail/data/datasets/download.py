"""Downloads the files of a data set: resumed, verified, and in place only once they are complete.

An unfinished file is `<file>.part` next to its place. VITRAIL_OFFLINE=1 forbids all requests.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from vitrail.core.atomic_files import sync_folder
from vitrail.core.errors import DataError, SourceNotFound
from vitrail.core.http import ChecksumError, Reply, RequestError, UnsafeRequest, download, is_offline, split_address
from vitrail.data.datasets.catalogue import DataFile

Progress = Callable[[str, int, int | None], None]  # the file's name, bytes done, bytes in all
LARGEST: Final = 2**40  # bytes of a file of unknown size


def fetch(file: DataFile, root: Path, progress: Progress | None = None) -> Path:
    """The file in its place; one that exists is not downloaded again."""
    path = root / file.path
    if path.exists():
        return path
    if file.url is None:
        raise SourceNotFound(f"{path} cannot be downloaded: {file.note or 'it has no address for programs'}")
    if is_offline():
        raise SourceNotFound(f"{path} is missing and vitrail is offline (VITRAIL_OFFLINE); put {file.url} there")
    if split_address(file.url) is None:
        raise DataError(f"{file.url} is not an http(s) address")
    part = path.with_name(f"{path.name}.part")
    checksum = f"sha256:{file.sha256}" if file.sha256 else f"md5:{file.md5}" if file.md5 else None

    def expect(reply: Reply) -> str | None:
        if file.size is not None and reply.total is not None and reply.total != file.size and not reply.is_at_end:
            raise DataError(f"{file.url} has {reply.total:,} bytes, not {file.size:,}: is it a page about the file?")
        return checksum

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = partial(progress, path.name) if progress else None
        most = file.size or LARGEST
        download(file.url, part, expect=expect, max_bytes=most, progress=report, resume_unverified=True)
        os.replace(part, path)
        sync_folder(path.parent)
    except (ChecksumError, UnsafeRequest) as error:
        raise DataError(str(error)) from None
    except RequestError as error:
        remedy = f"run the command again to resume, or put the file at {path}"
        raise SourceNotFound(f"cannot download {file.url} ({error}); {remedy}") from None
    except OSError as error:
        raise DataError(f"{part} cannot be written ({error.strerror or error}); give another folder") from None
    return path
