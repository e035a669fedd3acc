"""The tables of docs/data-sets.md, from the catalogue."""

from collections.abc import Iterable

from vitrail.core.text import format_bytes
from vitrail.data.datasets.catalogue import SETS, VTAB_TASKS, DataFile, NamedSet


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(heads)
    lines = [columns, ["---"] * len(columns), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def set_table() -> str:
    """Every name: classes, sizes, where to read about it, what to know."""
    rows = [
        [
            f"`{name}`",
            f"[{entry.title}]({entry.page})",
            f"{entry.classes:,}",
            ", ".join(f"{split} {count:,}" for split, count in entry.splits.items()),
            "; ".join(filter(None, [entry.terms, entry.note])),
        ]
        for name, entry in SETS.items()
    ]
    return markdown(["name", "set", "classes", "splits", "notes"], rows)


def file_table() -> str:
    """Every original file: the folder it goes to, its size, its checksum, where it comes from."""
    homes: dict[str, NamedSet] = {}
    for entry in SETS.values():
        homes.setdefault(entry.folder, entry)
    rows = [
        [
            f"`{home}/{file.path}`{' (optional)' if file.optional else ''}",
            format_bytes(file.size) if file.size else "",
            f"`{file.checksum}`" if file.checksum else "none known",
            origin(file),
        ]
        for home, entry in homes.items()
        for file in entry.files
    ]
    return markdown(["file", "size", "checksum", "from"], rows)


def origin(file: DataFile) -> str:
    words = [f"<{file.url}>" if file.url else "by hand", file.note]
    return "; ".join(word for word in words if word)


def task_table() -> str:
    """VTAB's tasks: sizes, label rules, what augmentation would spoil."""
    rows = [
        [
            f"`vtab/{name}`",
            f"{task.title} ({task.group})",
            f"`{task.source}`",
            str(task.classes),
            " / ".join(f"{size:,}" for size in task.sizes),
            cuts(name),
            task.label,
            ", ".join(word for word, keep in (("no crop", task.crop), ("no flip", task.flip)) if not keep),
        ]
        for name, task in VTAB_TASKS.items()
    ]
    heads = ["name", "task", "made of", "classes", "train / val / test", "cut", "label", "augmentation"]
    return markdown(heads, rows)


def cuts(name: str) -> str:
    """What is not just a split of the set, in hundredths of one."""
    words: list[str] = []
    for split, (whole, start, end) in VTAB_TASKS[name].plan.items():
        if (whole, start, end) != (split, 0, 100):
            words.append(f"{split}: {whole}{'' if (start, end) == (0, 100) else f' {start}-{end} %'}")
    return ", ".join(words) or "same as the set"
