"""Look through a torch pickle without running it: what it names, how it nests, which storages it asks for.

``torch.load(weights_only=True)`` runs a small machine on the file's instructions. It keeps code out, but it calls
what is on its own list with the file's arguments (``bytearray(10**12)`` is on it), trusts a storage's declared size
in the old format and hashes tuples nested however deep. This module walks through the same instructions with
placeholders first, so that torch is only ever handed a pickle that names nothing but tensors and plain containers.
"""

import pickletools
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Final

from vitrail.checkpoint.files.checks import RESAVE, corrupt, quote, refuse, shorten
from vitrail.core.errors import CorruptWeights, MismatchedWeights, UnsafeWeights, WeightsError

MOST_STEPS: Final = 2_000_000  # instructions; a ViT-L with its optimiser takes under a hundred thousand
MOST_NESTING: Final = 64  # tuples within tuples; hashing them recurses in C without a guard

STORAGE_ITEM: Final = {
    "torch DoubleStorage": 8,
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch BFloat16Storage": 2,
    "torch LongStorage": 8,
    "torch IntStorage": 4,
    "torch ShortStorage": 2,
    "torch CharStorage": 1,
    "torch ByteStorage": 1,
    "torch BoolStorage": 1,
    "torch ComplexFloatStorage": 8,
    "torch ComplexDoubleStorage": 16,
    "torch.storage UntypedStorage": 1,
}
DTYPE_NAMES: Final = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool", "int8", "int16", "int32"),
    *("int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
ALLOWED: Final = {
    *STORAGE_ITEM,
    *(f"torch {name}" for name in DTYPE_NAMES),
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter",
    "torch Size",
    "torch device",
    "collections OrderedDict",
    "collections Counter",
    "__builtin__ set",
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


_PLACEHOLDER: Final = object()  # stands for every value that the scan need not tell apart


@dataclass(kw_only=True, slots=True)
class Scan:
    """What a pickle was found to ask for."""

    storages: dict[str, int] = field(default_factory=dict)  # key -> bytes
    texts: list[str] = field(default_factory=list)  # every text pushed, in order
    value: object = None  # the result where it is a number or a text


def scan_pickle(path: Path, stream: BytesIO) -> Scan:
    """Walk through one pickle up to its end; refuse all that plain weights do not need."""
    machine = _Machine(path)
    try:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if steps > MOST_STEPS:
                raise refuse(UnsafeWeights, path, f"its pickle takes over {MOST_STEPS} instructions", RESAVE)
            machine.step(opcode.name, argument)
    except (WeightsError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle provokes ValueError, IndexError, KeyError, UnicodeDecodeError, ...
        raise corrupt(path, f"its pickle is damaged ({shorten(error)})") from None
    return machine.scan


class _Machine:
    """The instructions that torch's restricted unpickler knows, on placeholders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scan = Scan()
        self.stack: list[object] = []
        self.outer: list[list[object]] = []  # stacks set aside at a mark
        self.memo: dict[int, object] = {}

    def step(self, name: str, argument: object) -> None:
        """One instruction."""
        if name in ("BINUNICODE", "SHORT_BINSTRING"):
            self.scan.texts.append(str(argument))
            self.stack.append(argument)
        elif name in ("BININT", "BININT1", "BININT2", "LONG1"):
            self.stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[int(str(argument))] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[int(str(argument))])
        elif name == "GLOBAL":
            self.stack.append(self._global(str(argument)))
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
            self._marked()
        elif name in ("REDUCE", "NEWOBJ", "BUILD", "APPEND"):
            self.stack.pop()
            self.stack[-1] = _PLACEHOLDER
        elif name == "SETITEM":
            del self.stack[-2:]
        elif name == "BINPERSID":
            self._storage(self.stack.pop())
            self.stack.append(_PLACEHOLDER)
        elif name == "STOP":
            self.scan.value = self.stack.pop()
        elif name != "PROTO":
            self._unknown(name)

    def _marked(self) -> list[object]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def _tuple(self, name: str) -> None:
        if name == "TUPLE":
            items = self._marked()
        else:
            count = 0 if name == "EMPTY_TUPLE" else int(name[-1])
            items = [self.stack.pop() for _ in range(count)][::-1]
        depth = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
        if depth > MOST_NESTING:
            raise refuse(UnsafeWeights, self.path, f"nests tuples over {MOST_NESTING} deep", RESAVE)
        self.stack.append(_Tuple(tuple(items), depth))

    def _global(self, name: str) -> _Global:
        if name in UNREADABLE:
            what, remedy = UNREADABLE[name]
            raise refuse(MismatchedWeights, self.path, f"tensor {self._owner()} {what}", remedy)
        if name not in ALLOWED:
            cause = f"asks for {quote(name.replace(' ', '.'))} near {self._owner()}, which could run code"
            raise refuse(UnsafeWeights, self.path, cause, "nothing of it was run; " + RESAVE)
        return _Global(name)

    def _unknown(self, name: str) -> None:
        """Newer protocols reach other ways for code; torch does not write them, so none is followed."""
        cause = f"its pickle holds the instruction {name}, which torch.save does not write"
        raise refuse(UnsafeWeights, self.path, cause, "nothing of it was run; " + RESAVE)

    def _storage(self, identity: object) -> None:
        """A storage is asked for by ('storage', type, key, device, count); the old format adds None."""
        items = identity.items if isinstance(identity, _Tuple) else ()
        if len(items) == 6 and items[5] is None:
            items = items[:5]
        if len(items) != 5 or items[0] != "storage":
            raise refuse(CorruptWeights, self.path, f"storage of {self._owner()} is not named as torch does", RESAVE)
        _, kind, key, _, count = items
        item = STORAGE_ITEM.get(kind.name) if isinstance(kind, _Global) else None
        if item is None or not isinstance(key, str) or not isinstance(count, int) or count < 0:
            raise refuse(CorruptWeights, self.path, f"storage of {self._owner()} has no type or size", RESAVE)
        if self.scan.storages.setdefault(key, count * item) != count * item:
            raise refuse(CorruptWeights, self.path, f"storage {quote(key)} is declared with two sizes", RESAVE)

    def _owner(self) -> str:
        """The name that the value now being built will have: the nearest text on the stack."""
        for stack in (self.stack, *reversed(self.outer)):
            for value in reversed(stack):
                if isinstance(value, str) and value != "storage":
                    return quote(value)
        return "the start"
