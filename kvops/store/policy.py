"""Which frame goes next: least recently used, a list for each frame size.

A policy never sees frames that are being written; leased frames it sees and must pass over.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from .frame import Frame


class Policy(Protocol):
    """The order in which frames of one size are given up."""

    def add(self, frame: Frame) -> None:
        """Take in a frame that has just become ready."""

    def touch(self, frame: Frame) -> None:
        """Note that *frame* was used."""

    def remove(self, frame: Frame) -> None:
        """Forget *frame*: it is no longer ready."""

    def candidates(self) -> Iterator[Frame]:
        """Yield the frames it holds, the one to give up first at the front."""

    def __len__(self) -> int:
        """Return how many frames it holds."""


class Lru:
    """Least recently used first. A touch costs one dictionary move."""

    def __init__(self) -> None:
        self._order: OrderedDict[Frame, None] = OrderedDict()
        self.add = self._order.setdefault
        self.touch = self._order.move_to_end

    def remove(self, frame: Frame) -> None:
        """Forget *frame*."""
        self._order.pop(frame, None)

    def candidates(self) -> Iterator[Frame]:
        """Yield frames, least recently used first."""
        return iter(self._order)

    def __len__(self) -> int:
        """Return how many frames it holds."""
        return len(self._order)


POLICIES = {"lru": Lru}
"""Eviction policies by the name used in the ``eviction`` setting."""
