"""The exact bytes that a vocabulary entry stands for."""

from __future__ import annotations

import re
from functools import cache

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte -> that byte.

    Printable Latin-1 bytes stand for themselves, the others for U+0100, U+0101, ... in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level BPE token; one with a foreign character is its own UTF-8."""
    table = _byte_of()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a sentencepiece token: `▁` is a space, `<0xNN>` is one byte."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
