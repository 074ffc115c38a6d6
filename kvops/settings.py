"""The kinds of value a setting can have: what each accepts, and the sentence it refuses with.

A kind is a small frozen value with two verbs. ``parse`` reads text from the environment, ``check``
takes a value from JSON or Python. Both return the final value or raise ``ValueError`` with
``"<what is expected>; got <what came>"``; the caller adds the name and the origin.
"""

import dataclasses
import difflib
import re
from fractions import Fraction
from typing import Protocol

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
}
"""Unit to bytes. All-lower-case spellings work too; ``Gb`` does not, since it means bits."""

_UNITS = UNITS | {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")
_SIZE_EXPECTED = "a size such as 8GiB, 512 MiB, 1.5GB or a whole number of bytes"


def shown(value: object) -> str:
    """Return *value* as an error message shows it: short, and with its kind unless it is text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    if len(text) > 80:
        text = text[:77] + "..."
    return text if isinstance(value, (str, int)) else f"{text} (a {type(value).__name__})"


def parse_bytes(value: object) -> int:
    """Return a size in bytes from a whole number or from text with a unit.

    Units are B, kB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024), with or
    without a space; no unit means bytes. A fraction needs a unit and is rounded down to whole bytes.

    Raises:
        ValueError: *value* is anything else, or not positive. The message says what would do.

    Example:
        >>> parse_bytes("1.5 GiB")  # 1.5 * 1024 * 1024 * 1024
        1610612736
        >>> parse_bytes(4096)
        4096
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{_SIZE_EXPECTED}; got {shown(value)}")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value.strip(" \t"))
        if match is None or len(value) > 64:
            if re.match(r"\s*-", value):
                raise ValueError(f"a positive size; got {shown(value)}")
            raise ValueError(f"{_SIZE_EXPECTED}; got {shown(value)}")
        number, unit = match["number"], match["unit"]
        if unit.upper() in ("K", "M", "G", "T", "KI", "MI", "GI", "TI"):
            letter = unit[0].upper()
            both = f"{letter}B (powers of 1000) or {letter}iB (powers of 1024)"
            raise ValueError(f"a size with its unit spelled out, {both}; got {shown(value)}")
        if unit and unit not in _UNITS:
            raise ValueError(f"a size in one of {', '.join(UNITS)}; got {shown(value)}")
        if "." in number and unit.upper() in ("", "B"):
            raise ValueError(f"a whole number of bytes; got {shown(value)}")
        size = int(Fraction(number) * _UNITS[unit or "B"])
    if size <= 0:
        raise ValueError(f"a positive size; got {shown(value)}")
    return size


def format_bytes(size: int) -> str:
    """Return *size* in the largest binary unit that divides it, else with one decimal.

    Example:
        >>> format_bytes(4 * 1024**3)
        '4 GiB'
        >>> format_bytes(1_500_000_000)
        '1.4 GiB'
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            whole, rest = divmod(size, UNITS[unit])
            return f"{size / UNITS[unit]:.1f} {unit}" if rest else f"{whole} {unit}"
    return f"{size} bytes"


class Kind(Protocol):
    """What one setting accepts."""

    @property
    def accepts(self) -> str:
        """What is accepted, as the documentation table says it."""
        ...

    def parse(self, text: str) -> object:
        """Return the value that *text*, from the environment, stands for."""
        ...

    def check(self, value: object) -> object:
        """Return *value*, from JSON or Python, in its final form."""
        ...

    def show(self, value: object) -> str:
        """Return a final value as the documentation and `kvferry config` show it."""
        ...


@dataclasses.dataclass(frozen=True)
class Size:
    """A number of bytes within bounds, both inclusive."""

    minimum: int
    maximum: int

    @property
    def accepts(self) -> str:
        """The bounds in words."""
        return f"a size, {format_bytes(self.minimum)} to {format_bytes(self.maximum)}"

    def parse(self, text: str) -> object:
        """Read text such as ``8GiB``."""
        return self.check(text)

    def check(self, value: object) -> object:
        """Read a whole number of bytes, or text with a unit."""
        size = parse_bytes(value)
        if not self.minimum <= size <= self.maximum:
            raise ValueError(f"{self.accepts}; got {shown(value)}")
        return size

    def show(self, value: object) -> str:
        """Show the size in its unit."""
        return format_bytes(value) if isinstance(value, int) else str(value)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole number within bounds, both inclusive."""

    minimum: int
    maximum: int

    @property
    def accepts(self) -> str:
        """The bounds in words."""
        return f"a whole number, {self.minimum} to {self.maximum}"

    def parse(self, text: str) -> object:
        """Read decimal digits."""
        if not re.fullmatch(r"-?[0-9]{1,18}", text.strip()):
            raise ValueError(f"{self.accepts}; got {shown(text)}")
        return self.check(int(text))

    def check(self, value: object) -> object:
        """Take an int; a bool, a float or text is not one."""
        if isinstance(value, bool) or not isinstance(value, int):
            quoted = isinstance(value, str) and re.fullmatch(r"[0-9]+", value)
            hint = "; write it without quotes" if quoted else ""
            raise ValueError(f"{self.accepts}; got {shown(value)}{hint}")
        if not self.minimum <= value <= self.maximum:
            raise ValueError(f"{self.accepts}; got {value}")
        return value

    def show(self, value: object) -> str:
        """Show the number."""
        return str(value)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One word of a closed set."""

    words: tuple[str, ...]

    @property
    def accepts(self) -> str:
        """The words."""
        if len(self.words) == 1:
            return f'"{self.words[0]}"'
        return "one of " + ", ".join(f'"{word}"' for word in self.words)

    def parse(self, text: str) -> object:
        """Read one of the words."""
        return self.check(text)

    def check(self, value: object) -> object:
        """Take one of the words, spelled exactly so."""
        if isinstance(value, str) and value in self.words:
            return value
        hint = ""
        if isinstance(value, str):
            near = difflib.get_close_matches(value.strip().lower(), self.words, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
        elif value is False and "off" in self.words:
            hint = '; YAML reads a bare off as false: write "off" with quotes'
        raise ValueError(f"{self.accepts}; got {shown(value)}{hint}")

    def show(self, value: object) -> str:
        """Show the word."""
        return str(value)


@dataclasses.dataclass(frozen=True)
class AbsolutePath:
    """The absolute path of a file or a folder, or nothing."""

    is_folder: bool = False
    accepts: str = "an absolute path, or null"

    def parse(self, text: str) -> object:
        """Read a path."""
        return self.check(text)

    def check(self, value: object) -> object:
        """Take None or an absolute path; one that ends in a slash does not name a file."""
        if value is None:
            return None
        if not isinstance(value, str):
            raise ValueError(f"{self.accepts}; got {shown(value)}")
        if not value.startswith("/") or "\0" in value:
            # the engine's processes may have different working directories and homes
            raise ValueError(f"{self.accepts}; got {shown(value)}")
        if value.endswith("/") and not self.is_folder:
            raise ValueError(f"the path of a file, not of a folder; got {shown(value)}")
        return value

    def show(self, value: object) -> str:
        """Show the path, or a word for none."""
        return "none" if value is None else str(value)
