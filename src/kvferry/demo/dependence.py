"""Does equality of tokens prove anything? It does if a wrong block would have changed them.

Two checks on the running engine: another first prompt token must change the answer, and so must
two blobs that changed places in the store (with their checksums, so that nothing refuses them).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from .blobs import Blob, swap_blobs
from .engine import Answer

Tokens = Sequence[int]

MIN_DISTINCT = 4
"""An answer of fewer different tokens is called monotonous: it may be right by accident."""


class Generates(Protocol):
    """What the checks need of an engine."""

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Answer]:
        """Answer prompts greedily."""
        ...

    def settle(self) -> None:
        """Wait until all stores are published."""
        ...

    def reset(self) -> None:
        """Drop the engine's own prefix cache."""
        ...


def is_monotonous(tokens: Tokens) -> bool:
    """Return whether *tokens* repeat so much that equality would say little."""
    return len(set(tokens)) < min(MIN_DISTINCT, len(tokens))


def first_token_changes(
    engine: Generates, prompts: Sequence[Tokens], answers: Sequence[Tokens], vocab_size: int
) -> float:
    """Ask each prompt with another first token; return the share of output tokens that changed.

    Returns:
        0 to 1; 0 also if the answer to any prompt did not change at all.
    """
    changed_prompts = [[_other_token(prompt[0], vocab_size), *prompt[1:]] for prompt in prompts]
    others = engine.generate(changed_prompts, max_tokens=len(answers[0]))
    differing = [
        sum(a != b for a, b in zip(tokens, other.tokens, strict=True))
        for tokens, other in zip(answers, others, strict=True)
    ]
    if not all(differing):
        return 0.0
    return sum(differing) / sum(len(tokens) for tokens in answers)


def swapped_blobs_change(
    engine: Generates, prompt: Tokens, answer: Tokens, arena: Path, blobs: Iterable[Blob]
) -> bool:
    """Exchange blobs of *prompt* in the arena, ask it again, and put them back.

    Args:
        engine: that owns the arena; nothing may be in flight besides what this asks.
        prompt: whose blobs are all in the store.
        answer: to *prompt*, from right blobs.
        arena: the file.
        blobs: of *prompt*; in each group the first and the last of them change places.

    Returns:
        Whether the answer became another one.
    """
    pairs = []
    ordered = sorted(blobs, key=lambda blob: (blob.group, blob.header))
    for _, group in itertools.groupby(ordered, key=lambda blob: blob.group):
        members = list(group)
        if len(members) > 1:
            pairs.append((members[0], members[-1]))
    if not pairs:
        return False
    engine.settle()
    engine.reset()
    for first, last in pairs:
        swap_blobs(arena, first, last)
    try:
        (wrong,) = engine.generate([prompt], max_tokens=len(answer))
        engine.settle()
    finally:
        for first, last in pairs:
            swap_blobs(arena, first, last)
    return tuple(wrong.tokens) != tuple(answer)


def _other_token(token: int, vocab_size: int) -> int:
    """Return a token that is neither *token* nor one of the special ones."""
    return 3 + (token - 3 + vocab_size // 2) % (vocab_size - 3)
