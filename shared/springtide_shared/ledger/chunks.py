"""Chunk rows: 4,096 settled tasks in one body, about 36 bytes a task.

Of a task that ended without trouble a code, an attempt number and the digest of its completion
record are kept; what else there is to say of the others stands in a compressed list. The digests
are the bulk and do not compress, so they are stored as they are.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from sys import byteorder
from typing import Final

import msgspec

from springtide_shared.errors import Reason
from springtide_shared.ledger.records import NO_CHARGES, Phase, TaskRecord
from springtide_shared.ports.ledger import CHUNK_TASKS

_DIGEST_BYTES: Final = 32
_ZLIB_LEVEL: Final = 6


class _Note(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a code cannot tell of one task."""

    offset: int
    reason: str
    exit_code: int | None
    record_attempt: int
    charged: tuple[int, ...]


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """The body. `version` comes first, so that a later layout can be told from this one."""

    version: int
    codes: bytes
    attempts: bytes
    """Attempt numbers, 16 bits each, little-endian."""
    digests: bytes
    """Of the succeeded tasks, in order."""
    notes: bytes


_DECODER: Final = msgspec.msgpack.Decoder(_Packed)
_NOTES: Final = msgspec.msgpack.Decoder(list[_Note])


class Chunk:
    """The settled ones among the tasks from `number * 4096` on."""

    __slots__ = ("_attempts", "_codes", "_digests", "_notes", "first")

    def __init__(self, number: int) -> None:
        self.first = number * CHUNK_TASKS
        self._codes = bytearray(CHUNK_TASKS)
        self._attempts = array("H", bytes(2 * CHUNK_TASKS))
        self._digests: dict[int, bytes] = {}
        self._notes: dict[int, _Note] = {}

    @property
    def codes(self) -> bytes:
        """One byte a task: its `Phase` if it is folded into this chunk, else 0."""
        return bytes(self._codes)

    def put(self, index: int, record: TaskRecord) -> None:
        """Fold a settled task in (again, if something became of it since)."""
        offset = index - self.first
        assert record.phase.is_settled, "only settled tasks are folded"
        self._codes[offset] = record.phase
        self._attempts[offset] = record.attempt
        self._digests.pop(offset, None)
        self._notes.pop(offset, None)
        if record.phase is Phase.SUCCEEDED:
            assert len(record.digest) == _DIGEST_BYTES, "a success has a record with a digest"
            self._digests[offset] = record.digest
            if (
                record.charged == NO_CHARGES
                and record.record_attempt == record.attempt
                and not record.exit_code
            ):
                return
        self._notes[offset] = _Note(
            offset,
            "" if record.phase is Phase.SUCCEEDED else record.reason,
            record.exit_code,
            record.record_attempt,
            record.charged,
        )

    def get(self, index: int) -> TaskRecord | None:
        """The task as far as the chunk remembers it; None if it is not folded in."""
        offset = index - self.first
        phase = Phase(self._codes[offset])
        if phase is Phase.QUEUED:
            return None
        attempt = self._attempts[offset]
        record = TaskRecord(phase=phase, attempt=attempt, floor=attempt)
        if phase is Phase.SUCCEEDED:
            record.digest = self._digests[offset]
            record.record_attempt = attempt
            record.reason = Reason.COMPLETED.value
            record.exit_code = 0
        note = self._notes.get(offset)
        if note is not None:
            record.reason = note.reason or record.reason
            record.exit_code = note.exit_code
            record.record_attempt = note.record_attempt
            record.charged = note.charged
        return record

    def pack(self) -> bytes:
        """The row's body."""
        attempts = self._attempts
        if byteorder == "big":
            attempts = attempts[:]
            attempts.byteswap()
        notes = [self._notes[offset] for offset in sorted(self._notes)]
        return msgspec.msgpack.encode(
            _Packed(
                1,
                zlib.compress(bytes(self._codes), _ZLIB_LEVEL),
                zlib.compress(attempts.tobytes(), _ZLIB_LEVEL),
                b"".join(self._digests[offset] for offset in sorted(self._digests)),
                zlib.compress(msgspec.msgpack.encode(notes), _ZLIB_LEVEL),
            )
        )

    @classmethod
    def unpack(cls, number: int, body: bytes) -> Chunk:
        """The reverse of `pack`."""
        packed = _DECODER.decode(body)
        chunk = cls(number)
        chunk._codes = bytearray(zlib.decompress(packed.codes))
        attempts = array("H", zlib.decompress(packed.attempts))
        if byteorder == "big":
            attempts.byteswap()
        chunk._attempts = attempts
        success = Phase.SUCCEEDED.value
        offsets = [offset for offset, code in enumerate(chunk._codes) if code == success]
        digests = packed.digests
        chunk._digests = {
            offset: digests[at : at + _DIGEST_BYTES]
            for offset, at in zip(offsets, range(0, len(digests), _DIGEST_BYTES), strict=True)
        }
        chunk._notes = {note.offset: note for note in _NOTES.decode(zlib.decompress(packed.notes))}
        return chunk


def codes_of(body: bytes) -> bytes:
    """Only the codes of a packed chunk, without the cost of the rest."""
    return zlib.decompress(_DECODER.decode(body).codes)


def fold(
    number: int, body: bytes | None, records: Iterable[tuple[int, TaskRecord]]
) -> tuple[bytes, bytes]:
    """Fold settled tasks into a body (None: there was none); returns the new one and its codes."""
    chunk = Chunk(number) if body is None else Chunk.unpack(number, body)
    for index, record in records:
        chunk.put(index, record)
    return chunk.pack(), chunk.codes
