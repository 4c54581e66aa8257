import struct

import pytest

from kvtransfer.payload import FORMAT_VERSION, HEADER_NBYTES, MAGIC, check, encode_header, read_header

NAMESPACE, HASH = b"n" * 32, b"h" * 32
PAYLOAD = bytes(range(256)) * 8


def with_byte(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_header_says_what_it_stands_before():
    header = encode_header(NAMESPACE, HASH, memoryview(PAYLOAD))
    assert len(header) == HEADER_NBYTES == 128
    assert check(header, NAMESPACE, HASH, memoryview(PAYLOAD)) is None
    said = read_header(memoryview(header + b"padding"))
    assert said is not None
    assert (said.namespace, said.block_hash, said.payload_nbytes) == (NAMESPACE, HASH, len(PAYLOAD))


def test_bytes_are_the_documented_ones():
    """Other processes and later releases read them: this layout is a contract."""
    header = encode_header(NAMESPACE, HASH, PAYLOAD)
    magic, version, namespace, block_hash, nbytes = struct.unpack_from("<8sI4x32s32sQ", header)
    assert (magic, version) == (b"BATONBLK", 1) == (MAGIC, FORMAT_VERSION)
    assert (namespace, block_hash, nbytes) == (NAMESPACE, HASH, len(PAYLOAD))


@pytest.mark.parametrize(
    ("mutate", "field"),
    [
        (lambda h, p: (b"", p), "magic"),
        (lambda h, p: (h[:100], p), "magic"),
        (lambda h, p: (with_byte(h, 0), p), "magic"),
        (lambda h, p: (with_byte(h, 8), p), "version"),
        (lambda h, p: (with_byte(h, 20), p), "header"),
        (lambda h, p: (with_byte(h, 100), p), "header"),
        (lambda h, p: (with_byte(h, 127), p), "header"),
        (lambda h, p: (encode_header(b"x" * 32, HASH, p), p), "namespace"),
        (lambda h, p: (encode_header(NAMESPACE, b"x" * 32, p), p), "block_hash"),
        (lambda h, p: (h, p[:-1]), "length"),
        (lambda h, p: (h, b""), "length"),
        (lambda h, p: (h, with_byte(p, 0)), "checksum"),
        (lambda h, p: (h, with_byte(p, len(p) - 1)), "checksum"),
        (lambda h, p: (bytes(len(h)), p), "magic"),
    ],
)
def test_what_does_not_match_is_named(mutate, field):
    header, payload = mutate(encode_header(NAMESPACE, HASH, PAYLOAD), PAYLOAD)
    assert check(header, NAMESPACE, HASH, memoryview(payload)) == field
    intact = field not in ("magic", "version", "header")
    assert (read_header(header) is not None) is intact


def test_every_flipped_bit_of_a_header_is_seen():
    header = encode_header(NAMESPACE, HASH, PAYLOAD)
    for bit in range(HEADER_NBYTES * 8):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert check(bytes(flipped), NAMESPACE, HASH, PAYLOAD) is not None, bit


def test_digests_of_another_length_are_refused():
    with pytest.raises(ValueError, match="32 bytes expected, got 31 and 32"):
        encode_header(b"n" * 31, HASH, PAYLOAD)
