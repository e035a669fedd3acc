"""Reads the class names of YOLO data sets from data.yaml, classes.txt, names.txt, obj.names or names.json.

    names: [cat, dog]      names:        names:
                             - cat         0: cat
                             - dog         1: dog

Only these forms of YAML are supported; names in any other form are an error.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from vitrail.core.errors import DataError, describe_error
from vitrail.data.readers.annotated import clean_name, read_bytes, refuse_repeated
from vitrail.data.readers.folder import list_folder

LISTS: Final = ("classes.txt", "names.txt", "obj.names")
JSON: Final = "names.json"
MOST_BYTES: Final = 1 << 20
MOST_CLASSES: Final = 100_000
ENTRY: Final = re.compile(r"""(?:(\d{1,8})\s*:\s*)?("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,\[\]{}"'#\s][^,\[\]{}#\n]*)""")
PARTS: Final = ("names", "things", "semantic")  # keys of a json with several numberings


def find_names(folders: Sequence[Path], highest: int = -1) -> tuple[str, ...] | None:
    """Reads the class names from the first folder that has them; None if none does. In a json with several numberings,
    chooses the first that covers the `highest` class in use."""
    for folder in folders:
        others = list_folder(str(folder)).others
        tables = sorted(
            (n for n in others if n.lower().endswith((".yaml", ".yml"))), key=lambda n: (n != "data.yaml", n)
        )
        for name in tables:
            if (names := read_yaml(folder / name)) is not None:
                return check_names(folder / name, names)
        for name in LISTS:
            if name in others:
                return check_names(folder / name, decode_text(folder / name).strip().splitlines())
        if JSON in others and (names := read_json(folder / JSON, highest)) is not None:
            return check_names(folder / JSON, names)
    return None


def check_names(path: Path, names: Sequence[object]) -> tuple[str, ...]:
    found = [clean_name(name, str(path)) for name in names]
    if not 0 < len(found) <= MOST_CLASSES:
        raise DataError(f"{path} names {len(found):,} classes; there must be 1 to {MOST_CLASSES:,}")
    refuse_repeated(found, str(path))
    return tuple(found)


def decode_text(path: Path) -> str:
    try:
        return read_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: the class names are not in UTF-8; save the file as UTF-8") from None


def read_json(path: Path, highest: int) -> list[object] | None:
    """Reads a list of names, or an object from numbers to names, possibly nested in another object."""
    try:
        content: Any = json.loads(decode_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {describe_error(error)}; expected a list of names") from None
    if isinstance(content, list):
        return cast(list[object], content)
    if not isinstance(content, dict):
        return None
    whole = cast(dict[str, Any], content)
    parts = [whole[key] for key in PARTS if isinstance(whole.get(key), dict | list)]
    found = [fill_gaps(part) if len(parts) > 1 else part for part in parts or [whole]]
    chosen = next((part for part in found if len(part) > highest), found[0])
    return (
        order_names(path, cast(dict[Any, object], chosen)) if isinstance(chosen, dict) else cast(list[object], chosen)
    )


def fill_gaps(names: Any) -> Any:
    """Adds the name "class N" for every number without a name."""
    if not isinstance(names, dict):
        return names
    known = cast(dict[Any, object], names)
    numbers = [int(key) for key in known if str(key).isascii() and str(key).isdigit() and len(str(key)) < 6]
    return {**{str(number): f"class {number}" for number in range(max(numbers, default=-1) + 1)}, **known}


def order_names(path: Path, names: Mapping[Any, object]) -> list[object]:
    """Orders names by number. DataError unless the numbers are 0, 1, 2, ... without gaps."""
    numbers = {
        int(key): name for key, name in names.items() if str(key).isascii() and str(key).isdigit() and len(str(key)) < 9
    }
    if len(numbers) < len(names) or (numbers and sorted(numbers) != list(range(len(numbers)))):
        raise DataError(f"{path}: the names are not numbered 0 to {len(names) - 1}; number them without gaps")
    return [numbers[number] for number in range(len(numbers))]


def read_yaml(path: Path) -> list[object] | None:
    """Reads the names in a YAML file; None if it has none."""
    lines = decode_text(path).splitlines()
    start = next((at for at, line in enumerate(lines) if re.match(r"names\s*:", line)), None)
    if start is None:
        return None
    head = lines[start].partition(":")[2]
    block = [line for line in lines[start + 1 :] if line.strip() and not line.lstrip().startswith("#")]
    if drop_comment(head).strip():
        names = read_flow(path, "\n".join([head, *block]).strip())
    else:
        end = next(
            (at for at, line in enumerate(block) if not line[0].isspace() and not line.startswith("-")), len(block)
        )
        names = read_block(path, block[:end])
    number = next((found[1] for line in lines if (found := re.match(r"nc\s*:\s*(\d{1,8})\s*(?:#.*)?$", line))), None)
    if number is not None and int(number) != len(names):
        raise DataError(f"{path}: nc is {number}, but names has {len(names):,}; make them agree")
    return names


def drop_comment(text: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", text)


def refuse_yaml(path: Path, text: str) -> DataError:
    remedy = f"write names: [cat, dog], or a file {LISTS[0]} with one name per line"
    return DataError(f"{path}: names in an unsupported form, {text.strip()[:40]!r}; {remedy}")


def read_flow(path: Path, text: str) -> list[object]:
    """Parses [cat, dog] or {0: cat, 1: dog}, which may span several lines."""
    closing = {"[": "]", "{": "}"}.get(text[0])
    if closing is None:
        raise refuse_yaml(path, text)
    at, found = 1, list[tuple[str | None, str]]()
    while True:
        at = skip_blank(text, at)
        if text[at : at + 1] == closing:
            break
        entry = ENTRY.match(text, at)
        if entry is None or entry.end() == at:
            raise refuse_yaml(path, text)
        found.append((entry[1], unquote(entry[2].strip())))
        at = skip_blank(text, entry.end())
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != closing:
            raise refuse_yaml(path, text)
    return number_entries(path, found, numbered=closing == "}")


def skip_blank(text: str, at: int) -> int:
    """Skips white space and comments; returns the next position."""
    found = re.compile(r"(?:\s|(?<=\s)#[^\n]*)*").match(text, at)
    return found.end() if found else at


def read_block(path: Path, lines: Sequence[str]) -> list[object]:
    """Parses one name per line, after a dash or a number."""
    found: list[tuple[str | None, str]] = []
    for line in lines:
        entry = re.fullmatch(r"\s*(?:-|(\d{1,8}|'\d{1,8}'|\"\d{1,8}\")\s*:)\s+(.*?)\s*", drop_comment(line))
        if entry is None or not entry[2] or entry[2][0] in "[{&*!|>":
            raise refuse_yaml(path, line)
        found.append((entry[1].strip("'\"") if entry[1] else None, unquote(entry[2])))
    if not found:
        raise refuse_yaml(path, "")
    return number_entries(path, found, numbered=found[0][0] is not None)


def number_entries(path: Path, found: Sequence[tuple[str | None, str]], *, numbered: bool) -> list[object]:
    if any((number is not None) != numbered for number, _ in found):
        raise refuse_yaml(path, found[0][1] if found else "")
    if not numbered:
        return [name for _, name in found]
    if len({number for number, _ in found}) < len(found):
        raise DataError(f"{path}: a class number repeats in names; number the classes 0, 1, 2, ...")
    return order_names(path, dict(found))


def unquote(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text
