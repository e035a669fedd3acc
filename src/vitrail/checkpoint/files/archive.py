"""Open a zip archive of tensors (.npz, .pth) with nothing left to trust but its bytes.

Two programs can read one zip differently: by its end or by its start, by the first or the last of two equal names.
An archive that leaves room for that is refused, so that what was checked here is what is read later.
"""

import contextlib
import struct
import zipfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, BinaryIO

from vitrail.checkpoint.files.refusal import DOWNLOAD_AGAIN, RESAVE, check_budget, refusal, shown, told
from vitrail.core.errors import CorruptWeights, UnsafeWeights, WeightsError

END_MARK = b"PK\x05\x06"
END_SIZE = 22  # bytes of the closing record without a comment, which no writer of weights leaves
END_COUNT = 10  # where that record counts the members,
MOST_COUNTED = 0xFFFF  # as far as two bytes can
ENCRYPTED = 0x41
FOLDER = 0x10  # torch's zip reader skips the bytes of such a member and returns memory as it found it
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others cannot be unpacked a bounded piece at a time
PIECE = 1 << 20  # bytes


def open_archive(path: Path, file: BinaryIO, size: int) -> zipfile.ZipFile:
    """The archive, once its directory is known to be honest about names, methods and sizes."""
    file.seek(max(0, size - END_SIZE))
    end = file.read(END_SIZE)
    if len(end) != END_SIZE or not end.startswith(END_MARK):
        raise refusal(CorruptWeights, path, "zip archive is cut short or has bytes after its end", DOWNLOAD_AGAIN)
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # BadZipFile and whatever else a damaged directory provokes in the library
        raise refusal(CorruptWeights, path, f"zip directory is damaged ({told(error)})", DOWNLOAD_AGAIN) from None
    members = archive.infolist()
    # One entry's wrong length can swallow those after it, which the library does not miss.
    (count,) = struct.unpack_from("<H", end, END_COUNT)
    if count != min(len(members), MOST_COUNTED):
        cause = f"zip directory lists {len(members)} members but counts {count}"
        raise refusal(CorruptWeights, path, cause, DOWNLOAD_AGAIN)
    if min((member.header_offset for member in members), default=0) != 0:
        raise refusal(CorruptWeights, path, "zip archive does not start with its first member", DOWNLOAD_AGAIN)
    seen: set[str] = set()
    for member in members:
        _check_member(path, member)
        if member.filename in seen:
            raise refusal(CorruptWeights, path, f"member {shown(member.filename)} appears twice", RESAVE)
        seen.add(member.filename)
    check_budget(path, size, sum(member.file_size for member in members), what="its unpacked members")
    return archive


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    name = shown(member.filename)
    if member.flag_bits & ENCRYPTED:
        raise refusal(CorruptWeights, path, f"member {name} is encrypted", "re-save without a password")
    if member.external_attr & FOLDER or member.is_dir():
        raise refusal(CorruptWeights, path, f"member {name} is marked as a folder", DOWNLOAD_AGAIN)
    if member.compress_type not in METHODS:
        raise refusal(
            UnsafeWeights, path, f"member {name} is packed by method {member.compress_type}", "re-save uncompressed"
        )
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        cause = f"member {name} is stored in {member.compress_size} bytes but declares {member.file_size}"
        raise refusal(CorruptWeights, path, cause, DOWNLOAD_AGAIN)


@contextlib.contextmanager
def opened_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Generator[IO[bytes]]:
    """A member's bytes as a stream; whatever the library finds wrong on the way names the member.

    The library stops at the declared size and compares the CRC there, so a member can neither run over nor differ.
    """
    try:
        with archive.open(member) as stream:
            yield stream
    except (WeightsError, MemoryError):
        raise
    except Exception as error:  # zlib.error, BadZipFile, EOFError, NotImplementedError, ValueError, ...
        cause = f"member {shown(member.filename)} is damaged ({told(error)})"
        raise refusal(CorruptWeights, path, cause, DOWNLOAD_AGAIN) from None


def pieces(path: Path, stream: IO[bytes], member: zipfile.ZipInfo, wanted: int) -> Iterator[bytes]:
    """The next ``wanted`` bytes of a member, a bounded piece at a time."""
    while wanted:
        piece = stream.read(min(wanted, PIECE))
        if not piece:
            raise refusal(CorruptWeights, path, f"member {shown(member.filename)} ends too early", DOWNLOAD_AGAIN)
        wanted -= len(piece)
        yield piece
