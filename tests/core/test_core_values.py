"""KV geometry, fingerprints, settings, fault points, error envelopes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import fields, replace

import pytest

from core import faults
from core.errors import ConfigError, ContextLengthExceeded, IncompatiblePeer
from core.kv import Fingerprint, KVLayout, parse_layers
from core.settings import SECRETS, Settings, load, parse_nbytes

FINGERPRINT = Fingerprint("m", "t", 30, 3, 64, 16, "fp32", "default/100000", 8192)


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "dtype", "expected"),
    [
        (30, 3, 64, "fp32", 46_080),
        (30, 3, 64, "bf16", 23_040),
        (32, 8, 128, "bf16", 128 * 1024),
        (32, 32, 128, "fp16", 512 * 1024),
        (30, 3, 64, "fp8_e4m3", 11_520),
        (30, 3, 64, "int8", 2 * 30 * 3 * (64 + 2)),
        (30, 3, 64, "k8v4", 30 * 3 * (64 + 2 + 32 + 3)),
    ],
)
def test_bytes_per_token_are_the_formula(
    layers: int, heads: int, dim: int, dtype: str, expected: int
) -> None:
    layout = KVLayout(layers, heads, dim, 16, dtype)
    assert layout.bytes_per_token == expected
    assert layout.block_nbytes == 16 * expected


def test_skipped_layers_hold_bf16_and_are_part_of_the_identity() -> None:
    layout = KVLayout(30, 3, 64, 16, "int8", (0, 28, 29))
    assert layout.bytes_per_token == 3 * (27 * 2 * (64 + 2) + 3 * 2 * 64 * 2)
    assert layout.block_nbytes == 16 * layout.bytes_per_token
    assert layout.identity == "int8/skip=0,28,29"
    assert [(b.offset, b.num_layers, b.head_nbytes) for b in layout.bands] == [
        (0, 1, 4096),
        (3 * 4096, 27, 2112),
        (3 * (4096 + 27 * 2112), 2, 4096),
    ]
    assert len(replace(layout, skip_layers=()).bands) == 1


@pytest.mark.parametrize(("text", "layers"), [("", ()), ("29", (29,)), ("27-29, 0,28", (0, 27, 28, 29))])
def test_layers_of_a_list(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, 30) == layers


@pytest.mark.parametrize(
    ("text", "says"),
    [("30", "within 0 to 29"), ("3-1", "within"), ("-1", "neither"), ("1-", "neither"), ("x", "neither")],
)
def test_what_is_no_list_of_layers_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_layers(text, 30)


def test_unknown_geometry_is_refused() -> None:
    with pytest.raises(ConfigError, match="8, 16, 32, 64"):
        KVLayout(1, 1, 64, 12, "fp32")
    with pytest.raises(ConfigError, match="bf16"):
        KVLayout(1, 1, 64, 16, "fp12")
    with pytest.raises(ConfigError, match="multiple of 16"):
        KVLayout(1, 1, 72, 16, "k8v4")
    with pytest.raises(ConfigError, match="quantizes none"):
        KVLayout(1, 1, 64, 16, "bf16", (0,))


@pytest.mark.parametrize("field", [f.name for f in fields(Fingerprint)])
def test_every_field_separates_a_pair_and_is_named(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    other = replace(FINGERPRINT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    difference = FINGERPRINT.difference(other)
    assert difference is not None
    assert difference[0] == field
    assert field in IncompatiblePeer(*difference).message


@pytest.mark.parametrize(
    "field", ["model_digest", "tokenizer_digest", "kv_dtype", "block_size", "layout_version"]
)
def test_namespace_covers_what_decides_the_bytes(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    other = replace(FINGERPRINT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.namespace != FINGERPRINT.namespace


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2GiB", 2**31), ("500 MB", 500_000_000), ("1.5k", 1500), ("1_048_576", 2**20), ("7", 7)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


def test_levels_of_settings_and_their_origins(tmp_path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('dtype = "bf16"\nblock-size = 32\nport = 1\n')
    settings, origins = load({"port": "3"}, {"BATON_PORT": "2", "BATON_MAX_NUM_SEQS": "9"}, str(file))
    assert (settings.dtype, settings.block_size, settings.max_num_seqs, settings.port) == ("bf16", 32, 9, 3)
    assert origins["dtype"].source == f"file {file}"
    assert origins["max_num_seqs"].source == "environment BATON_MAX_NUM_SEQS"
    assert origins["port"].source == "flag --port"
    assert origins["decode"].source == "default"


@pytest.mark.parametrize(
    ("environ", "toml", "says"),
    [
        ({"BATON_BLOCKSIZE": "16"}, "", "did you mean block_size"),
        ({}, "blok_size = 16", "did you mean block_size"),
        ({}, "dtype = 3", "dtype"),
        ({"BATON_PORT": "many"}, "", "environment BATON_PORT"),
        ({}, "dtype = ", "not valid TOML"),
    ],
)
def test_a_bad_setting_is_one_sentence(tmp_path, environ: dict[str, str], toml: str, says: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=says):
        load({}, environ, str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        load({}, {}, str(tmp_path / "absent.toml"))


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_of_the_wrong_kind_is_not_quoted(tmp_path, name: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(f"{name} = 4711471147114711")
    with pytest.raises(ConfigError, match=name) as caught:
        load({}, {}, str(file))
    assert "4711" not in caught.value.message


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_fault_points_hit_when_told_to() -> None:
    try:
        faults.configure("engine.step@2=raise, transfer.read=delay:0.05")
        faults.hit("engine.step")
        with pytest.raises(faults.InjectedFault):
            faults.hit("engine.step")
        faults.hit("engine.step")
        began = time.monotonic()
        faults.hit("transfer.read")
        assert time.monotonic() - began >= 0.05
        for bad in ("nothing=raise", "engine.step=explode", "engine.step@x=raise", "engine.step=hold:here"):
            with pytest.raises(ConfigError):
                faults.configure(bad)
    finally:
        faults.configure("")
    faults.hit("engine.step")


async def test_a_gate_holds_after_as_many_as_it_lets_pass(tmp_path) -> None:
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    try:
        faults.configure(f"decode.start=hold:{gate}")
        await faults.reached("decode.start")
        for _ in range(2):  # it counts anew each time it is closed
            gate.write_text("1")
            await faults.reached("decode.start")
            passing = asyncio.create_task(faults.reached("decode.start"))
            while not held.exists():
                await asyncio.sleep(0.001)
            assert not passing.done()
            gate.unlink()
            await passing
            assert not held.exists()
    finally:
        faults.configure("")


def test_envelope() -> None:
    error = ContextLengthExceeded("too long", param="prompt")
    assert error.http_status == 400
    assert error.envelope() == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    }
