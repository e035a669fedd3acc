"""Parses what all of COCO's json files share: images, categories and annotations. Checks the file as a whole."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, describe_error
from vitrail.core.text import format_size
from vitrail.data.annotations.rle import MOST_PIXELS
from vitrail.data.annotations.segments import SegmentClass
from vitrail.data.readers.annotated import check_file_name, clean_name, read_bytes, refuse_repeated

ID_DIGITS: Final = 18  # most digits of an id that is text


class CocoImages(NamedTuple):
    """The images, categories and annotations of a file."""

    names: list[str]
    sizes: NDArray[np.int64]  # [N, 2] height, width; 0 if the file does not state them
    places: dict[int | str, int]  # image id -> index in `names`
    categories: dict[int | str, int]  # category id -> index in `classes`
    classes: list[SegmentClass]
    annotations: list[Any]


def parse_json(path: Path) -> Any:
    """Parses a json file. DataError if it is malformed."""
    data = read_bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        remedy = "the file is truncated or damaged; copy or export it again"
        raise DataError(f"{path}: {describe_error(error)}; {remedy}") from None


def parse_id(value: object) -> int | str | None:
    """Parses the id of an image, category or annotation: a number or a text; numeric text counts as a number. None for
    anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= ID_DIGITS else value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2.0**53 else None
    return value if isinstance(value, int) else None


def list_part(path: Path, content: Any, part: str) -> list[Any]:
    """Returns a list of objects from the file, such as its images. DataError if it is missing or malformed."""
    found = cast(Any, content.get(part)) if isinstance(content, dict) else None
    if not isinstance(found, list):
        what = f"{part!r} is {type(found).__name__}" if found is not None else f"there is no {part!r}"
        raise DataError(f"{path}: {what}; a COCO json needs lists of images, annotations and categories")
    for at, one in enumerate(cast(list[Any], found)):
        if not isinstance(one, dict):
            raise DataError(f"{path}: {part}[{at}] is {repr(one)[:60]}, not an object")
    return cast(list[Any], found)


def parse_images(path: Path, content: Any) -> CocoImages:
    """Parses and checks the images and categories of a file."""
    images, annotations = list_part(path, content, "images"), list_part(path, content, "annotations")
    names: list[str] = []
    places: dict[int | str, int] = {}
    files: dict[str, int] = {}
    sizes = np.zeros((len(images), 2), np.int64)
    for at, image in enumerate(images):
        where = f"{path}: images[{at}]"
        number = parse_id(image.get("id"))
        if number is None or number in places:
            fact = "which is not unique" if number is not None else "which is not a number or text"
            raise DataError(f"{where} has the id {repr(image.get('id'))[:60]}, {fact}; give every image a unique id")
        places[number] = at
        names.append(check_file_name(image.get("file_name"), where))
        if (first := files.setdefault(names[-1], at)) != at:
            raise DataError(f"{where} has the file of images[{first}], {names[-1]}; give every file one entry")
        size = [image.get("height"), image.get("width")]
        if size != [None, None]:
            if not all(
                isinstance(side, int | float) and 1 <= side <= MOST_PIXELS and side == int(side) for side in size
            ):
                raise DataError(f"{where}: height and width are {repr(size)[:80]}; they must be whole numbers from 1")
            sizes[at] = size
            if int(sizes[at].prod()) > MOST_PIXELS:
                raise DataError(
                    f"{where}: {format_size((int(size[0]), int(size[1])))} is above the limit of {MOST_PIXELS:,} pixels"
                )
    if not names:
        raise DataError(f"{path}: no images: the list is empty")
    classes, categories = parse_categories(path, list_part(path, content, "categories"), annotations)
    return CocoImages(names, sizes, places, categories, classes, annotations)


def parse_categories(
    path: Path, found: Sequence[Any], annotations: Sequence[Any]
) -> tuple[list[SegmentClass], dict[int | str, int]]:
    """Parses the categories: the classes ordered by id, and the index of each id."""
    used = {parse_id(one.get("category_id")) for one in annotations}
    used |= {parse_id(part.get("category_id")) for one in annotations for part in list_segments(one)}
    by_id: dict[int | str, Any] = {}
    for at, one in enumerate(found):
        number = parse_id(one.get("id"))
        if number is None or number in by_id:
            fact = "which is not unique" if number is not None else "which is not a number or text"
            raise DataError(
                f"{path}: categories[{at}] has the id {repr(one.get('id'))[:60]}, {fact}; give it a unique id"
            )
        by_id[number] = one
    parents = {(one.get("supercategory"), number) for number, one in by_id.items() if is_text(one.get("supercategory"))}
    for number in list(by_id):
        named = by_id[number].get("name")
        if number not in used and any(parent == named and child != number for parent, child in parents):
            del by_id[number]
    order = sorted(
        by_id, key=lambda number: (isinstance(number, str), number if isinstance(number, int) else 0, str(number))
    )
    names = [clean_name(by_id[number].get("name"), f"{path}: category {number}") for number in order]
    refuse_repeated(names, str(path))
    if not names:
        raise DataError(f"{path}: no categories: the list is empty, and annotations need classes")
    classes = [
        SegmentClass(name, read_flag(by_id[number].get("isthing", 1)))
        for name, number in zip(names, order, strict=True)
    ]
    return classes, {number: at for at, number in enumerate(order)}


def is_text(value: object) -> bool:
    return isinstance(value, str)


def read_flag(value: object) -> bool:
    return value not in (0, False)


def list_segments(annotation: Any) -> list[Any]:
    """The segments of a panoptic annotation; empty for the annotation of an object."""
    found = annotation.get("segments_info")
    return [part for part in found if isinstance(part, dict)] if isinstance(found, list) else []
