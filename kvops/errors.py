"""Everything that kvferry raises on purpose.

::

    Exception
    └── KVFerryError                 catch this one to catch all of them
        ├── ConfigError              a setting is unknown or unusable (also a ValueError)
        ├── ArenaError               the shared memory that holds the blobs
        │   ├── ArenaBusyError       a live process owns it
        │   ├── ArenaMismatchError   it has another size, format or version than asked for
        │   ├── ArenaSpaceError      no room, or no permission, for it
        │   └── ArenaDamagedError    its own bookkeeping contradicts itself
        ├── DiskError                the folder on disk that holds blobs
        │   ├── DiskBusyError        a live process owns it
        │   └── DiskDamagedError     its own bookkeeping contradicts itself
        ├── VineyardError            a vineyard daemon, and what travels over its socket
        │   ├── VineyardProtocolError    bytes or fields that are no message of the protocol
        │   ├── VineyardStatusError      the daemon answered with a status code
        │   ├── VineyardConnectionError  no daemon there, or it went away
        │   └── VineyardTimeoutError     it did not answer in time
        ├── TransferError            moving bytes between the engine's pages and the arena
        └── UnsupportedEngineError   this engine, version, model or set-up is not one we can serve

Whose fault it is follows from the branch: ``ConfigError`` is the user's to fix, ``ArenaError``,
``DiskError`` and ``VineyardError`` the machine's or another process's, ``UnsupportedEngineError`` the combination's. A wrong argument to a
function is a plain ``ValueError`` or ``TypeError`` and not in this tree. A miss, a full store and a
failed checksum are answers, not errors.
"""


class KVFerryError(Exception):
    """Base of every error in this package."""


class ConfigError(KVFerryError, ValueError):
    """A setting is unknown, has the wrong type or unit, or lies outside its range."""


class ArenaError(KVFerryError):
    """The arena cannot be used; the message says why and what to do."""


class ArenaBusyError(ArenaError):
    """A live process owns the arena; the message names it."""


class ArenaMismatchError(ArenaError):
    """The arena found has another size, format or version than the one asked for."""


class ArenaSpaceError(ArenaError):
    """The file system or the memory limit has no room for the arena, or access is not allowed."""


class ArenaDamagedError(ArenaError):
    """The arena's own bookkeeping contradicts itself; nothing in it is used."""


class DiskError(KVFerryError):
    """The folder of the disk tier cannot be used; the message says why and what to do."""


class DiskBusyError(DiskError):
    """A live process owns the folder; the message names its pid."""


class DiskDamagedError(DiskError):
    """The folder's own bookkeeping contradicts itself; nothing in it is used, and nothing is deleted."""


class VineyardError(KVFerryError):
    """Talking to a vineyard daemon, or being one, went wrong."""


class VineyardProtocolError(VineyardError):
    """What came over the socket is no message of the protocol; the message says which field or byte."""


class VineyardStatusError(VineyardError):
    """The daemon answered with a status code instead of what was asked for.

    Attributes:
        code: the number on the wire; ``kvops/vineyard/status.py`` names them.
        reason: the daemon's own words.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"vineyard answered with code {code}: {reason}")
        self.code = code
        self.reason = reason

    def __reduce__(self) -> tuple[type["VineyardStatusError"], tuple[int, str]]:
        # the one-argument form that Exception would be rebuilt from lacks the code
        return type(self), (self.code, self.reason)


class VineyardConnectionError(VineyardError):
    """No daemon listens, or it closed the connection; the next call connects again."""


class VineyardTimeoutError(VineyardError):
    """The daemon did not answer in time; the connection was given up, the next call makes a new one."""


class TransferError(KVFerryError):
    """A transfer was asked for that cannot be carried out, or its workers are gone."""


class UnsupportedEngineError(KVFerryError):
    """The engine, its version, the model or the set-up is not one we can serve."""
