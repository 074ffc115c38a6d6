"""What the checksum's documentation says that it detects, and what it says that it does not."""

import itertools

import numpy as np

from kvferry.kernels.checksum import FOLD, KEY, VECTOR_BYTES, checksum_bytes

WORD = 1 << 32
SIGNS = (1, -1)
WEIGHTS = [pow(FOLD, place, WORD) for place in range(4)]


def logarithm(number):
    """Return x with KEY ** x == number mod 2 ** 32, or None; bit by bit, as powers of two allow it."""
    if number % 4 != 1:
        return None
    x = 0
    for bit in range(30):
        rest = number * pow(KEY, -x, WORD) % WORD
        if (rest - 1) % (1 << (bit + 3)):
            x |= 1 << bit
    assert pow(KEY, x, WORD) == number
    return x


def test_flips_in_two_vectors_could_only_cancel_93_mib_apart():
    """Bits of different places have changes of different powers of two, which odd keys cannot make equal.

    Bit 31 is left out: its changes are +-2 ** 31, and no sum or difference of two keys is 0 mod 2 ** 33.
    """
    distances = []
    for bit in range(31):
        period = 1 << (32 - bit)
        for one, two, up, down in itertools.product(WEIGHTS, WEIGHTS, SIGNS, SIGNS):
            # a change of the digest, over 2 ** bit: modulo its period, of either sign
            first, second = up * one % period, down * two % period
            for a, b in itertools.product((first, first - period), (second, second - period)):
                # keys below 2 ** 32 must make the sum of the products 0, or 2 ** 64 at least
                if a * b > 0 and abs(a + b) <= period:
                    continue
                apart = logarithm(-b * pow(a, -1, WORD) % WORD)
                if apart:
                    distances.append(min(apart, (1 << 30) - apart))
    assert min(distances) * VECTOR_BYTES > 93 << 20


def test_one_in_508_pairs_of_flips_in_one_vector_is_missed():
    missed = []
    pairs = list(itertools.combinations(range(128), 2))
    # all four directions of a pair of flips: either bit is set, or cleared, or both
    for one, two in pairs:
        for is_set in itertools.product((False, True), repeat=2):
            before = sum(1 << bit for bit, was in zip((one, two), is_set, strict=True) if was)
            after = before ^ (1 << one) ^ (1 << two)
            old, new = (checksum_bytes(v.to_bytes(16, "little")) for v in (before, after))
            if old == new:
                missed.append((one, two))
    assert 4 * len(pairs) // len(missed) == 508
    assert {bit % 32 for pair in missed for bit in pair} == {27, 28, 29, 30, 31}


def test_signs_of_all_numbers_of_a_vector_are_missed():
    numbers = np.arange(1, 9, dtype=np.float32)
    assert checksum_bytes(numbers.tobytes()) == checksum_bytes((-numbers).tobytes())
    numbers[3] = -numbers[3]
    assert checksum_bytes(numbers.tobytes()) != checksum_bytes((-np.abs(numbers)).tobytes())
