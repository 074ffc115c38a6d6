"""From blobs to requests: blobs that lie one behind the other on the disk travel in one request.

Slots are handed out in the order of the file, and the chunks of a prompt are saved and loaded in the order of the prompt.
So its blobs are neighbours, and a request can carry many: the price of a request, a third of that of a 64 KiB blob, is
paid once for all of them. In memory they may lie anywhere, header pages and frames are pieces of their own.
"""

import mmap
from collections.abc import Iterable

import numpy as np

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.file_io import Direction, Request

from .format import header_area
from .headers import write_page
from .jobs import Move

MERGED_BYTES = 1 << 20
"""How large requests are made by putting blobs together, bytes; drives gain nothing beyond."""

MERGED_BLOBS = 16
"""Blobs in one request."""


class HeaderPages:
    """Aligned memory for header areas, one for each blob on its way.

    Args:
        count: how many.
        parts: of the store's blobs.
        arena_address, buffer: the arena.
    """

    def __init__(self, count: int, parts: int, arena_address: int, buffer: memoryview) -> None:
        self._parts = parts
        self._area = header_area(parts)
        self._arena_address = arena_address
        self._buffer = buffer
        memory = mmap.mmap(-1, count * self._area)
        self._pages = memoryview(memory)
        self._address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._free = list(range(count))

    @property
    def free(self) -> int:
        """How many are not in use."""
        return len(self._free)

    def page(self, move: Move) -> memoryview:
        """Return the header area of a move."""
        at = move.page * self._area
        return self._pages[at : at + self._area]

    def give_back(self, move: Move) -> None:
        """Let another move have its page, if it has one."""
        if move.page >= 0:
            self._free.append(move.page)
            move.page = -1

    def requests(self, moves: Iterable[Move]) -> list[Request]:
        """Give each move a page, filled in for a save, and put neighbours together; a request's owner is its moves."""
        made: list[Request] = []
        pieces: list[tuple[int, int]] = []
        direction, fd, end, left_bytes, left = Direction.READ, -1, -1, 0, 0
        for move in moves:
            place, frame = move.place, move.frame
            assert place is not None, "the move has begun"
            move.page = self._free.pop()
            at = move.page * self._area
            if move.direction is Direction.WRITE:
                page = self._pages[at : at + self._area]
                write_page(page, self._buffer, frame, place.generation, self._parts)
            blob_bytes = -(-frame.blob_bytes // fmt.PAGE) * fmt.PAGE
            page_piece = (self._address + at, self._area)
            blob_piece = (self._arena_address + frame.offset, blob_bytes)
            size = self._area + blob_bytes
            is_neighbour = place.offset == end and place.fd == fd and move.direction is direction
            if is_neighbour and left > 0 and size <= left_bytes:
                pieces += (page_piece, blob_piece)
                moves_of(made[-1]).append(move)
            else:
                if made:
                    made[-1].pieces = tuple(pieces)
                pieces = [page_piece, blob_piece]
                made.append(Request(move.direction, place.fd, place.offset, (), owner=[move]))
                direction, fd, left_bytes, left = (
                    move.direction,
                    place.fd,
                    MERGED_BYTES,
                    MERGED_BLOBS,
                )
            end, left_bytes, left = place.offset + size, left_bytes - size, left - 1
        if made:
            made[-1].pieces = tuple(pieces)
        return made

    def alone(self, request: Request) -> list[Request]:
        """Return a request for each blob of one that failed: the others must not fail with it."""
        made = []
        for number, move in enumerate(moves_of(request)):
            assert move.place is not None, "the move has begun"
            pieces = request.pieces[2 * number : 2 * number + 2]
            made.append(
                Request(request.direction, request.fd, move.place.offset, pieces, owner=[move])
            )
        return made


def moves_of(request: Request) -> list[Move]:
    """Return the moves that a request carries, in the order of the file."""
    moves = request.owner
    assert isinstance(moves, list), "made here"
    return moves
