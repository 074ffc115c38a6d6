"""From blobs to requests: blobs that lie one behind the other on the disk travel in one request.

Slots are handed out in the order of the file, and the chunks of a prompt are saved and loaded in the order of the prompt.
So its blobs are neighbours, and a request can carry many: the price of a request, a third of that of a 64 KiB blob, is
paid once for all of them. In memory they may lie anywhere, header pages and frames are pieces of their own.
"""

import mmap
import operator
from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.kvops.store import format as fmt
from kvferry.kvops.store.arena import Arena
from kvferry.kvops.store.file_io import Direction, Request

from .format import header_area
from .headers import make_pages, take_in
from .jobs import Move, place_of

MERGED_BYTES = 1 << 20
"""How large requests are made by putting blobs together, bytes; drives gain nothing beyond."""

MERGED_BLOBS = 16
"""Blobs in one request."""


class HeaderPages:
    """Aligned memory for header areas, one for each blob on its way.

    Args:
        count: how many.
        parts: of the store's blobs.
        arena: with their frames.
    """

    def __init__(self, count: int, parts: int, arena: Arena) -> None:
        self._parts = parts
        self._area = header_area(parts)
        self._arena = arena
        memory = mmap.mmap(-1, count * self._area)
        self._pages = np.frombuffer(memory, np.uint64).reshape(count, -1)
        self._address = self._pages.ctypes.data
        self._free = list(range(count))

    @property
    def free(self) -> int:
        """How many are not in use."""
        return len(self._free)

    def give_back(self, moves: Iterable[Move]) -> None:
        """Let others have the pages of moves that have one."""
        for move in moves:
            if move.page >= 0:
                self._free.append(move.page)
                move.page = -1

    def take_in(self, moves: Sequence[Move]) -> list[str | None]:
        """Judge what was read; see headers.take_in."""
        return take_in(self._pages, self._arena, moves, self._parts)

    def requests(self, moves: Sequence[Move]) -> list[Request]:
        """Give moves of one direction pages, and put neighbours together; a request's owner is its moves."""
        # whichever way round they were asked for
        moves = sorted(moves, key=operator.attrgetter("place.entry"))
        for move in moves:
            move.page = self._free.pop()
        if moves and moves[0].direction is Direction.WRITE:
            made = make_pages(self._arena, moves, self._parts)
            self._pages[[move.page for move in moves], : made.shape[1]] = made
        return self._merged(moves)

    def _merged(self, moves: Sequence[Move]) -> list[Request]:
        base, area, arena_address = self._address, self._area, self._arena.address
        made: list[Request] = []
        pieces: list[tuple[int, int]] = []
        together: list[Move] = []
        fd, end, left_bytes, left = -1, -1, 0, 0
        for move in moves:
            place, frame = move.place, move.frame
            assert place is not None, "the move has begun"
            blob_bytes = -(-frame.blob_bytes // fmt.PAGE) * fmt.PAGE
            page_piece = (base + move.page * area, area)
            blob_piece = (arena_address + frame.slot.offset, blob_bytes)
            size = area + blob_bytes
            is_neighbour = place.offset == end and place.fd == fd
            if is_neighbour and left > 0 and size <= left_bytes:
                pieces += (page_piece, blob_piece)
                together.append(move)
            else:
                if made:
                    made[-1].pieces = tuple(pieces)
                pieces = [page_piece, blob_piece]
                together = [move]
                made.append(Request(move.direction, place.fd, place.offset, (), owner=together))
                fd, left_bytes, left = place.fd, MERGED_BYTES, MERGED_BLOBS
            end, left_bytes, left = place.offset + size, left_bytes - size, left - 1
        if made:
            made[-1].pieces = tuple(pieces)
        return made

    def alone(self, request: Request) -> list[Request]:
        """Return a request for each blob of one that failed: the others must not fail with it."""
        made = []
        for number, move in enumerate(moves_of(request)):
            pieces = request.pieces[2 * number : 2 * number + 2]
            made.append(
                Request(request.direction, request.fd, place_of(move).offset, pieces, owner=[move])
            )
        return made


def moves_of(request: Request) -> list[Move]:
    """Return the moves that a request carries, in the order of the file."""
    moves = request.owner
    assert isinstance(moves, list), "made here"
    return moves
