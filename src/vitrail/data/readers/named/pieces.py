"""Samples that are pieces of larger files: at some place with some length, or one behind the other at a fixed one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import BadPicture
from vitrail.data.labels import Labels
from vitrail.data.source import Source
from vitrail.data.strings import Strings


class Pieces(Source):
    """Image files inside larger files: members of tar files, values in records."""

    def __init__(
        self,
        paths: Sequence[str],
        file: NDArray[np.int32],
        offset: NDArray[np.int64],
        length: NDArray[np.int64],
        names: Strings,
        labels: Labels,
        classes: Sequence[str],
    ) -> None:
        self.paths, self.names, self.labels, self.classes = Strings(paths), names, labels, tuple(classes)
        self.file, self.offset, self.length = file, offset, length

    def read(self, index: int) -> bytes:
        length = int(self.length[index])
        with open(self.paths[int(self.file[index])], "rb") as file:
            file.seek(int(self.offset[index]))
            data = file.read(length)
        if len(data) < length:
            raise BadPicture(f"{self.paths[int(self.file[index])]} is cut short")
        return data

    def name(self, index: int) -> str:
        return self.names[index]

    def sizes(self) -> NDArray[np.int64]:
        return self.length


class Records(Source):
    """Pixels of one size, at equal distances in a file; read one by one, so that gigabytes cost no memory."""

    def __init__(
        self, path: Path, *, start: int, stride: int, shape: tuple[int, ...], labels: Labels, classes: Sequence[str]
    ) -> None:
        self.path, self.labels, self.classes = str(path), labels, tuple(classes)
        self.start, self.stride, self.shape = start, stride, shape
        self.called = path.name

    def piece(self, index: int, length: int) -> NDArray[np.uint8]:
        with open(self.path, "rb") as file:
            file.seek(self.start + index * self.stride)
            data = file.read(length)
        if len(data) < length:
            raise BadPicture(f"{self.path} is cut short")
        return np.frombuffer(data, np.uint8)

    def read(self, index: int) -> NDArray[np.uint8]:
        return self.piece(index, int(np.prod(self.shape))).reshape(self.shape)

    def name(self, index: int) -> str:
        return f"{self.called}[{index}]"


class Bits(Records):
    """Records of one bit a pixel: black 0, white 255."""

    def read(self, index: int) -> NDArray[np.uint8]:
        return (np.unpackbits(self.piece(index, self.stride), count=int(np.prod(self.shape))) * np.uint8(255)).reshape(
            self.shape
        )
