"""Checksums in a parquet file that find a flipped bit before anything is parsed.

    PAR1 | pages | seal | footer | length of the footer | PAR1

Readers find the footer from the end of the file and pages from the footer, so other programs never
look at the seal. Parquet's own page checksums leave out the footer, which is most of a file of one
run, and are only tried for the columns that are read.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import IO

from ppbench.store.damage import DamagedError

WHOLE_BYTES = 2**20
"""A file of at most this size is checked as a whole; of a larger one only the footer is, and its
pages are as they are read."""
_MAGIC = b"PPB\x00SEAL"
_SEAL = struct.Struct("<8sII")  # magic, CRC-32 of what is before the seal, and of what is after it
_TAIL = struct.Struct("<I4s")  # length of the footer, PAR1
_PARQUET = b"PAR1"
_CHUNK_BYTES = 2**20


def seal(file: IO[bytes]) -> None:
    """Put the seal before the footer of a complete parquet file, open to be read and written."""
    file.flush()
    start = _footer_start(file)
    file.seek(start)
    footer = file.read()
    before = _crc_until(file, start)
    file.seek(start)
    file.truncate()
    file.write(_SEAL.pack(_MAGIC, before, zlib.crc32(footer)) + footer)


def check_seal(file: IO[bytes]) -> bool:
    """Whether the file has a seal: older ones have none. Raises DamagedError, OSError.

    Raises DamagedError if it has one that is broken, and if the file is no whole parquet file.
    """
    start = _footer_start(file)
    at = max(0, start - _SEAL.size)
    file.seek(at)
    held = file.read(start - at)
    if len(held) < _SEAL.size or not held.startswith(_MAGIC):
        return False
    _, before, after = _SEAL.unpack(held)
    if zlib.crc32(file.read()) != after:
        raise DamagedError("the checksum of its footer does not match")
    if file.tell() <= WHOLE_BYTES and _crc_until(file, at) != before:
        raise DamagedError("its checksum does not match")
    return True


def _footer_start(file: IO[bytes]) -> int:
    """Raises DamagedError for what does not end as a parquet file does."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise DamagedError("it is empty")
    if size < len(_PARQUET) + _TAIL.size:
        raise DamagedError(f"it is no parquet file: {size} bytes long")
    file.seek(size - _TAIL.size)
    length, end = _TAIL.unpack(file.read(_TAIL.size))
    start = size - _TAIL.size - int(length)
    if end != _PARQUET:
        raise DamagedError("it is no parquet file, or its end is missing")
    if start < len(_PARQUET):
        raise DamagedError("its footer is longer than the file")
    return start


def _crc_until(file: IO[bytes], end: int) -> int:
    file.seek(0)
    crc, left = 0, end
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        crc = zlib.crc32(chunk, crc)
        left -= len(chunk)
    return crc
