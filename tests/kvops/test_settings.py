"""Sizes, numbers, words and paths: what each kind accepts and how it refuses."""

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kvops.settings import (
    UNITS,
    AbsolutePath,
    Choice,
    Size,
    Whole,
    format_bytes,
    parse_bytes,
)

# a busy machine is no failure
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 << 29),
        ("16mib", 16 << 20),
        ("7 kB", 7000),
        ("7KB", 7000),
        ("4096", 4096),
        (" 4096 ", 4096),
        ("12B", 12),
        (4096, 4096),
        # rounded down to whole bytes: 0.3 * 1024 = 307.2
        ("0.3KiB", 307),
        ("2TiB", 2 << 40),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "a size such as 8GiB"),
        ("lots", "a size such as 8GiB"),
        ("1e9", "a size"),
        ("0x10", "a size"),
        ("1_000", "a size such as"),
        ("\uff18GiB", "a size such as"),
        ("nan", "a size such as"),
        ("inf", "a size such as"),
        ("9" * 100, "a size such as"),
        ("8 Gb", "one of B, kB"),
        ("8 parsec", "one of B, kB"),
        ("8G", "GB (powers of 1000) or GiB (powers of 1024)"),
        ("8Gi", "GB (powers of 1000) or GiB (powers of 1024)"),
        ("8k", "KB (powers of 1000) or KiB"),
        ("1.5", "a whole number of bytes"),
        ("1.5B", "a whole number of bytes"),
        ("-8GiB", "a positive size"),
        ("0", "a positive size"),
        ("0.0001KiB", "a positive size"),
        (0, "a positive size"),
        pytest.param(-(10**5000), "a number of 16610 bits", id="huge"),
        (-1, "a positive size"),
        (True, "got true (a boolean)"),
        (None, "got null"),
        (8e9, "got 8000000000.0 (a float)"),
        (float("nan"), "got nan (a float)"),
        ([1], "got [1] (a list)"),
        ({"a": 1}, "(a dict)"),
        (b"8GiB", "(a bytes)"),
    ],
)
def test_parse_bytes_refuses(value, words):
    with pytest.raises(ValueError, match="; got ") as caught:
        parse_bytes(value)
    assert words in str(caught.value)


@PATIENT
@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_parse_bytes_whole_numbers(number, unit, gap):
    assert parse_bytes(f"{number}{gap}{unit}") == number * UNITS[unit]
    assert parse_bytes(f"{number}{gap}{unit.lower()}") == number * UNITS[unit]


@PATIENT
@given(st.decimals(1, 10**6, places=4), st.sampled_from(["kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_parse_bytes_fractions_are_exact_then_rounded_down(number, unit):
    assert parse_bytes(f"{number}{unit}") == int(Fraction(str(number)) * UNITS[unit])


@PATIENT
@given(st.integers(1, 1 << 60))
def test_parse_bytes_of_a_number_is_the_number(size):
    assert parse_bytes(size) == size
    assert parse_bytes(str(size)) == size


@PATIENT
@given(st.integers(1, 1 << 13), st.sampled_from([0, 10, 20, 30]))
def test_format_bytes_of_whole_units_reads_back(number, shift):
    text = format_bytes(number << shift)
    if "." not in text:
        assert parse_bytes(text.replace(" bytes", "")) == number << shift


@PATIENT
@given(st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.none(), st.binary()))
def test_parse_bytes_answers_or_says_what_would_do(value):
    try:
        answer = parse_bytes(value)
    except ValueError as error:
        answer = str(error)
    if isinstance(answer, str):
        assert "; got " in answer
        assert len(answer) < 250
    else:
        assert answer > 0


@pytest.mark.parametrize("kind", [Size(1, 2), Whole(1, 2), Choice(("a", "b")), AbsolutePath()])
def test_every_kind_says_what_it_accepts(kind):
    assert kind.accepts
    with pytest.raises(ValueError, match="; got "):
        kind.check(object())
