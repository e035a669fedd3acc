"""Work that is done before it is asked for, in one thread, in order.

    with closing(Ahead(map(prepare, steps), depth=4)) as prepared:
        for step in prepared: ...

What comes out is what the iterator alone would give, errors included. The thread ends when the iterator does, when
`close` is called, when nobody holds the `Ahead` any longer, and when Python exits.
"""

import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Generic, TypeVar

from vitrail.core.errors import ConfigError

Item = TypeVar("Item")


class Table(Generic[Item]):
    """What lies between the two sides. Both queues may be put into from anywhere, a finaliser included, which locks
    of the usual kind do not allow."""

    def __init__(self, depth: int) -> None:
        self.room: SimpleQueue[None] = SimpleQueue()  # one entry for each item that may be made
        self.made: SimpleQueue[tuple[Item] | BaseException] = SimpleQueue()
        self.open = True
        for _ in range(depth):
            self.room.put(None)


class Ahead(Iterator[Item]):
    """The items of an iterator, up to `depth` of them made in advance."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        if depth < 1:
            raise ConfigError(f"depth={depth} must be at least 1")
        self.table = Table[Item](depth)
        # The thread knows the table but not this object, or it would keep it alive.
        self.thread = Thread(target=fill, args=(self.table, items), name="ahead", daemon=True)
        self.thread.start()
        self.finish = weakref.finalize(self, clear, self.table, self.thread)  # also called when Python exits

    def __next__(self) -> Item:
        if not self.finish.alive:
            raise StopIteration
        made = self.table.made.get()
        if isinstance(made, tuple):
            self.table.room.put(None)
            return made[0]
        self.close()
        raise made

    def close(self) -> None:
        """Ends the thread; what it made and nobody took is lost."""
        self.finish()


def fill(table: Table[Item], items: Iterator[Item]) -> None:
    """What the thread runs."""
    try:
        while True:
            table.room.get()
            if not table.open:
                return
            table.made.put((next(items),))
    except BaseException as error:  # raised again where an item is asked for; the end is one of them
        table.made.put(error)


def clear(table: "Table[Item]", thread: Thread) -> None:
    """Lets the thread finish the item it is at, and waits for that. A forked process has no such thread."""
    table.open = False
    table.room.put(None)
    if thread is not current_thread():
        thread.join()
