"""Reads files of ``torch.save``, new (zip) or old (pickle stream), through ``torch.load(weights_only=True)`` only.

Before torch reads the file, its CRCs are verified (which torch does not do), its pickle is scanned, and every storage
is checked against the bytes in the file. A file that fails is refused; there is no unsafe fallback.

``torch.load(weights_only=True)`` runs a small machine on the file's instructions. It keeps code out, but calls
functions on its allowlist with the file's arguments (``bytearray(10**12)`` is possible), trusts a storage's declared
size in the old format, and hashes tuples of any nesting depth. `scan_pickle` first walks through the same instructions
with placeholders, so that torch only ever gets a pickle that names nothing but tensors and plain containers.

Zip archives (.npz, .pth) are opened here, too. Two programs can read one zip differently: by its end or by its start,
by the first or the last of two equal names. An ambiguous archive is refused, so that what was checked here is what is
read later.
"""

import contextlib
import io
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import torch
from torch import Tensor

from vitrail.checkpoint.files.checks import RESAVE, check_budget, corrupt, quote, refuse, shorten
from vitrail.checkpoint.files.safetensors import DTYPES
from vitrail.core.errors import CorruptWeights, MismatchedWeights, UnsafeWeights, WeightsError

END_MARK = b"PK\x05\x06"
END_SIZE = 22  # bytes of the closing record without a comment, which no writer of weights leaves
END_COUNT = 10  # where that record counts the members ...
MOST_COUNTED = 0xFFFF  # ... in two bytes
ENCRYPTED = 0x41
FOLDER = 0x10  # torch's zip reader skips the bytes of such a member and returns uninitialised memory
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others cannot be unpacked in bounded pieces
PIECE = 1 << 20  # bytes


def open_archive(path: Path, file: BinaryIO, size: int) -> zipfile.ZipFile:
    """Opens an archive and verifies the names, methods and sizes in its directory."""
    file.seek(max(0, size - END_SIZE))
    end = file.read(END_SIZE)
    if len(end) != END_SIZE or not end.startswith(END_MARK):
        raise corrupt(path, "zip archive is cut short or has bytes after its end")
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # BadZipFile, or any other error that a damaged directory causes
        raise corrupt(path, f"zip directory is damaged ({shorten(error)})") from None
    members = archive.infolist()
    # An entry with a wrong length can swallow those after it, which the library does not notice.
    (count,) = struct.unpack_from("<H", end, END_COUNT)
    if count != min(len(members), MOST_COUNTED):
        raise corrupt(path, f"zip directory lists {len(members)} members but counts {count}")
    if min((member.header_offset for member in members), default=0) != 0:
        raise corrupt(path, "zip archive does not start with its first member")
    seen: set[str] = set()
    for member in members:
        _check_member(path, member)
        if member.filename in seen:
            raise refuse(CorruptWeights, path, f"member {quote(member.filename)} appears twice", RESAVE)
        seen.add(member.filename)
    check_budget(path, size, sum(member.file_size for member in members), what="its unpacked members")
    return archive


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    name = quote(member.filename)
    if member.flag_bits & ENCRYPTED:
        raise refuse(CorruptWeights, path, f"member {name} is encrypted", "re-save without a password")
    if member.external_attr & FOLDER or member.is_dir():
        raise corrupt(path, f"member {name} is marked as a folder")
    if (method := member.compress_type) not in METHODS:
        raise refuse(UnsafeWeights, path, f"member {name} is packed by method {method}", "re-save uncompressed")
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        raise corrupt(path, f"member {name} is stored in {member.compress_size} bytes but declares {member.file_size}")


@contextlib.contextmanager
def open_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Generator[IO[bytes]]:
    """A member's bytes as a stream; errors in reading it name the member.

    The library stops at the declared size and compares the CRC there, so a member can neither run over nor differ.
    """
    try:
        with archive.open(member) as stream:
            yield stream
    except (WeightsError, MemoryError):
        raise
    except Exception as error:  # zlib.error, BadZipFile, EOFError, NotImplementedError, ValueError, ...
        raise corrupt(path, f"member {quote(member.filename)} is damaged ({shorten(error)})") from None


def read_pieces(path: Path, stream: IO[bytes], member: zipfile.ZipInfo, wanted: int) -> Iterator[bytes]:
    """The next ``wanted`` bytes of a member, a bounded piece at a time."""
    while wanted:
        piece = stream.read(min(wanted, PIECE))
        if not piece:
            raise corrupt(path, f"member {quote(member.filename)} ends too early")
        wanted -= len(piece)
        yield piece


PICKLE = "/data.pkl"
PICKLE_LIMIT = 64 << 20  # bytes
OLD_MAGIC = 0x1950A86A20F9469CFC6C
OLD_PROTOCOL = 1001
OLD_COUNT = 8  # bytes in front of each storage of the old format
HOLDERS = ("model", "state_dict", "model_state_dict", "module", "teacher", "model_ema")


def read_torch_zip(path: Path, file: BinaryIO, size: int, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    """The tensors of a zip that ``torch.save`` wrote (since 1.6)."""
    members = {member.filename: member for member in archive.infolist()}
    pickled = [name for name in members if name.endswith(PICKLE)]
    if len(pickled) != 1:
        raise refuse(CorruptWeights, path, f"holds {len(pickled)} pickles where torch writes one", RESAVE)
    root = pickled[0].removesuffix(PICKLE)
    if f"{root}/constants.pkl" in members:
        raise refuse(MismatchedWeights, path, "is a TorchScript program", "save its state_dict() instead")
    for name, member in members.items():
        if not name.startswith(f"{root}/"):
            raise refuse(CorruptWeights, path, f"member {quote(name)} lies outside {quote(root)}", RESAVE)
        if member.compress_type != zipfile.ZIP_STORED:
            cause = f"member {quote(name)} is compressed, as torch never writes it"
            raise refuse(UnsafeWeights, path, cause, "re-save uncompressed with torch.save")
    if sum(member.file_size for member in members.values()) > size:
        raise refuse(UnsafeWeights, path, "its members overlap", RESAVE)
    content = bytearray()
    for name, member in members.items():
        with open_member(path, archive, member) as stream:
            if name == pickled[0] and member.file_size > PICKLE_LIMIT:
                raise refuse(UnsafeWeights, path, f"its pickle takes {member.file_size} bytes", RESAVE)
            for piece in read_pieces(path, stream, member, member.file_size):  # the CRC is compared on the way
                if name == pickled[0]:
                    content += piece
            stream.read(1)
    for key, wanted in scan_pickle(path, io.BytesIO(content)).storages.items():
        member = members.get(f"{root}/data/{key}")
        if member is None or member.file_size != wanted:
            held = "is missing" if member is None else f"holds {member.file_size}"
            raise corrupt(path, f"storage {quote(key)} should hold {wanted} bytes but {held}")
    return _load(path, file, size)


def read_torch_stream(path: Path, file: BinaryIO, size: int) -> dict[str, Tensor]:
    """The tensors of the format before 1.6: five pickles, then the storages one after the other.

    torch allocates its storages from the pickle and fills those that the last pickle lists; so the sizes must add up to
    the rest of the file, and the lists must agree, or memory would be wasted or returned uninitialised.
    """
    file.seek(0)
    # Scanned in memory: a file read of more bytes than there are allocates them all, a buffer's does not.
    stream = io.BytesIO(file.read(min(size, PICKLE_LIMIT)))
    if scan_pickle(path, stream).value != OLD_MAGIC or scan_pickle(path, stream).value != OLD_PROTOCOL:
        raise refuse(CorruptWeights, path, "is a pickle, but not one of torch.save", RESAVE)
    scan_pickle(path, stream)
    storages = scan_pickle(path, stream).storages
    listed = scan_pickle(path, stream).texts
    if sorted(listed) != sorted(storages):
        raise corrupt(path, "its list of storages does not match its tensors")
    wanted, held = sum(storages.values()) + OLD_COUNT * len(storages), size - stream.tell()
    if wanted != held:
        raise corrupt(path, f"its storages should take {wanted} bytes but have {held}")
    return _load(path, file, size)


def _load(path: Path, file: BinaryIO, size: int) -> dict[str, Tensor]:
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content: object = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # eleven types have been observed
        raise corrupt(path, f"torch.load refuses it ({type(error).__name__}: {shorten(error, 120)})") from None
    state = _state(path, content)
    check_budget(path, size, sum(tensor.nbytes for tensor in state.values()))
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def _state(path: Path, content: object) -> dict[str, Tensor]:
    """The state dict in the loaded object, at the top level or under one of the usual names."""
    if not isinstance(content, dict):
        cause = f"holds a {type(content).__name__} where a state dict is expected"
        raise refuse(MismatchedWeights, path, cause, "save model.state_dict()")
    table = cast(dict[Any, object], content)
    for holder in HOLDERS:
        held = table.get(holder)
        inner = cast(dict[Any, object], held) if isinstance(held, dict) else {}
        if any(isinstance(value, Tensor) for value in inner.values()):
            return _tensors(path, inner, holder)
    bare: dict[Any, object] = {name: value for name, value in table.items() if isinstance(value, Tensor)}
    if not bare:
        seen = ", ".join(quote(name, 40) for name in list(table)[:12]) or "nothing"
        cause = f"holds no state dict: its keys are {seen}"
        raise refuse(MismatchedWeights, path, cause, f"put the tensors at the top or under one of {', '.join(HOLDERS)}")
    return _tensors(path, bare, "the top")


def _tensors(path: Path, table: Mapping[Any, object], holder: str) -> dict[str, Tensor]:
    for name, value in table.items():
        if not isinstance(name, str):
            raise refuse(MismatchedWeights, path, f"tensor name {quote(name)} in {holder} is not a text", RESAVE)
        if not isinstance(value, Tensor):
            cause = f"{quote(name)} in {holder} is a {type(value).__name__}, not a tensor"
            raise refuse(MismatchedWeights, path, cause, "save model.state_dict() alone")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            cause = f"tensor {quote(name)} is {value.layout} {value.dtype} on {value.device}"
            raise refuse(MismatchedWeights, path, cause, "save it dense, dequantised and with its data")
        # A view may repeat one stored number many times; as a copy, it would fill the memory.
        if value.nbytes > (held := value.untyped_storage().nbytes()):
            cause = f"tensor {quote(name)} of shape {tuple(value.shape)} repeats a storage of {held} bytes"
            raise refuse(UnsafeWeights, path, cause, "re-save it after .contiguous()")
    return cast(dict[str, Tensor], table)


MOST_STEPS: Final = 2_000_000  # instructions; a ViT-L with its optimiser takes under a hundred thousand
MOST_NESTING: Final = 64  # tuples within tuples; hashing them recurses in C without a guard

_ITEM: Final = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "ComplexFloat": 8, "ComplexDouble": 16}
_WHOLE_ITEM: Final = {"Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1}
STORAGE_ITEM: Final = {f"torch {kind}Storage": size for kind, size in (_ITEM | _WHOLE_ITEM).items()}
STORAGE_ITEM["torch.storage UntypedStorage"] = 1
ALLOWED: Final = {
    *STORAGE_ITEM,
    *(str(dtype).replace(".", " ") for dtype in (*DTYPES.values(), torch.complex128)),
    *(f"torch._utils _rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter")),
    *("torch Size", "torch device", "collections OrderedDict", "collections Counter", "__builtin__ set"),
}
UNREADABLE: Final = {
    "torch._utils _rebuild_sparse_tensor": ("is sparse", "save it after .to_dense()"),
    "torch._utils _rebuild_sparse_csr_tensor": ("is sparse", "save it after .to_dense()"),
    "torch._utils _rebuild_qtensor": ("is quantised", "save it after .dequantize()"),
    "torch._utils _rebuild_meta_tensor_no_storage": ("has no data (meta device)", "save it from a real device"),
    "torch._utils _rebuild_nested_tensor": ("is nested", "save it as a padded tensor"),
}


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Tuple:
    items: tuple[object, ...]
    depth: int


_PLACEHOLDER: Final = object()  # stands for every value that the scan need not distinguish


def scan_pickle(path: Path, stream: io.BytesIO) -> "PickleScan":
    """Walks through one pickle to its end, and refuses whatever plain weights do not need."""
    machine = PickleScan(path)
    try:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if steps > MOST_STEPS:
                raise refuse(UnsafeWeights, path, f"its pickle takes over {MOST_STEPS} instructions", RESAVE)
            machine.step(opcode.name, argument)
    except (WeightsError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle provokes ValueError, IndexError, KeyError, UnicodeDecodeError, ...
        raise corrupt(path, f"its pickle is damaged ({shorten(error)})") from None
    return machine


class PickleScan:
    """The instructions that torch's restricted unpickler knows, on placeholders; and what a pickle asks for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storages: dict[str, int] = {}  # key -> bytes
        self.texts: list[str] = []  # every text pushed, in order
        self.value: object = None  # the result where it is a number or a text
        self.stack: list[object] = []
        self.outer: list[list[object]] = []  # stacks saved at a mark
        self.memo: dict[int, object] = {}

    def step(self, name: str, argument: object) -> None:
        """One instruction."""
        if name in ("BINUNICODE", "SHORT_BINSTRING"):
            self.texts.append(str(argument))
            self.stack.append(argument)
        elif name in ("BININT", "BININT1", "BININT2", "LONG1"):
            self.stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[int(str(argument))] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[int(str(argument))])
        elif name == "GLOBAL":
            self.stack.append(self._check_global(str(argument)))
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "NEWTRUE", "NEWFALSE", "BINFLOAT"):
            self.stack.append(_PLACEHOLDER)
        elif name == "NONE":
            self.stack.append(None)
        elif name == "MARK":
            self.outer.append(self.stack)
            self.stack = []
        elif name in ("TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            self._tuple(name)
        elif name in ("SETITEMS", "APPENDS"):
            self._pop_mark()
        elif name in ("REDUCE", "NEWOBJ", "BUILD", "APPEND"):
            self.stack.pop()
            self.stack[-1] = _PLACEHOLDER
        elif name == "SETITEM":
            del self.stack[-2:]
        elif name == "BINPERSID":
            self._storage(self.stack.pop())
            self.stack.append(_PLACEHOLDER)
        elif name == "STOP":
            self.value = self.stack.pop()
        elif name != "PROTO":
            # Newer protocols have other ways to reach code; torch does not write them, so they are refused.
            cause = f"its pickle holds the instruction {name}, which torch.save does not write"
            raise refuse(UnsafeWeights, self.path, cause, "nothing of it was run; " + RESAVE)

    def _pop_mark(self) -> list[object]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def _tuple(self, name: str) -> None:
        count = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}.get(name)
        items = self._pop_mark() if count is None else [self.stack.pop() for _ in range(count)][::-1]
        depth = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
        if depth > MOST_NESTING:
            raise refuse(UnsafeWeights, self.path, f"nests tuples over {MOST_NESTING} deep", RESAVE)
        self.stack.append(_Tuple(tuple(items), depth))

    def _check_global(self, name: str) -> _Global:
        if name in UNREADABLE:
            what, remedy = UNREADABLE[name]
            raise refuse(MismatchedWeights, self.path, f"tensor {self._owner()} {what}", remedy)
        if name not in ALLOWED:
            cause = f"asks for {quote(name.replace(' ', '.'))} near {self._owner()}, which could run code"
            raise refuse(UnsafeWeights, self.path, cause, "nothing of it was run; " + RESAVE)
        return _Global(name)

    def _storage(self, identity: object) -> None:
        """A storage is identified by ('storage', type, key, device, count); the old format appends None."""
        items = identity.items if isinstance(identity, _Tuple) else ()
        if len(items) == 6 and items[5] is None:
            items = items[:5]
        if len(items) != 5 or items[0] != "storage":
            raise refuse(CorruptWeights, self.path, f"storage of {self._owner()} is not named as torch does", RESAVE)
        _, kind, key, _, count = items
        item = STORAGE_ITEM.get(kind.name) if isinstance(kind, _Global) else None
        if item is None or not isinstance(key, str) or not isinstance(count, int) or count < 0:
            raise refuse(CorruptWeights, self.path, f"storage of {self._owner()} has no type or size", RESAVE)
        if self.storages.setdefault(key, count * item) != count * item:
            raise refuse(CorruptWeights, self.path, f"storage {quote(key)} is declared with two sizes", RESAVE)

    def _owner(self) -> str:
        """The name that the value now being built will have: the nearest text on the stack."""
        values = (value for stack in (self.stack, *reversed(self.outer)) for value in reversed(stack))
        return next((quote(value) for value in values if isinstance(value, str) and value != "storage"), "the start")
