"""A worker's start: its place, what is refused before the weights load, its footprint, its engine's death."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import ConfigError
from core.settings import Settings
from services.worker import build as build_module
from services.worker import footprint
from services.worker.build import build
from services.worker.kv_events import KVEventLog
from services.worker.process import until_asked, with_place


def settings(**values: Any) -> Settings:
    return Settings.model_validate({"dtype": "fp32", "transport": "shm", "num_blocks": 4} | values)


class TestPlace:
    def test_a_free_port_is_chosen_and_names_the_worker(self):
        placed = with_place(settings(), "decode")
        port = re.fullmatch(r"127\.0\.0\.1:([1-9]\d*)", placed.listen)
        assert port
        assert placed.advertise == placed.listen
        assert placed.worker_id == f"decode-127.0.0.1-{port[1]}"

    def test_containers_with_equal_ports_and_pids_have_ids_of_their_own(self):
        ids = {
            with_place(settings(listen="0.0.0.0:0", advertise=f"{host}:7000"), "prefill").worker_id
            for host in ("node-1", "node-2", "[fd00::3]")
        }
        assert ids == {"prefill-node-1-7000", "prefill-node-2-7000", "prefill-fd00::3-7000"}

    def test_a_given_id_stays(self):
        assert with_place(settings(worker_id="w"), "decode").worker_id == "w"

    @pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
    def test_peers_have_to_be_told_something_that_they_can_reach(self, listen: str):
        with pytest.raises(ConfigError, match="--advertise"):
            with_place(settings(listen=listen), "decode")


SPLIT = {"tensor_parallel_size": 3}


class TestRefusedBeforeTheWeightsLoad:
    @pytest.fixture(autouse=True)
    def no_weights(self, monkeypatch: pytest.MonkeyPatch):
        def load_weights(*_: object, **__: object):
            raise AssertionError("weights were loaded first")

        monkeypatch.setattr(build_module, "load_weights", load_weights)

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"max_model_len": 100_000}, "--max-model-len 100000 is beyond the model's context of 8192"),
            ({"num_blocks": None, "kv_cache_memory_bytes": 9}, "--kv-cache-memory-bytes 9 holds 0 blocks"),
            (
                {"tensor_parallel_size": 2},
                "3 KV heads, 9 heads and 1536 MLP units of the model do not all divide",
            ),
            (
                {"host_cache_bytes": 2**20, "enable_prefix_caching": False},
                "tiers keep blocks by their prefix: set enable_prefix_caching, or no tiers",
            ),
            (
                {"redis_url": "redis://x", "tier_order": "host,disk"},
                "--tier-order host,disk leaves out redis; add it or unset it",
            ),
            ({"tier_order": "host,tape"}, "tier 'tape' is not known"),
            (SPLIT | {"deterministic": True}, "--tensor-parallel-size 3 does not go with the same sums"),
        ],
    )
    def test_in_a_sentence_that_names_the_setting(self, values: dict[str, Any], said: str):
        with pytest.raises(ConfigError, match=re.escape(said)):
            build(settings(**values), "w", "1", 1, lambda _: None, KVEventLog(), lambda *_: None)


class HeavyTransport:
    """Takes memory when it starts, as NIXL does; `psutil.Process` of a process that takes no other."""

    name = "heavy"
    NBYTES = 10**12
    rss = 0

    def offer(self) -> bytes:
        self.rss = self.NBYTES
        return b""

    def memory_info(self) -> Any:
        return SimpleNamespace(rss=self.rss)


def test_other_memory_counts_the_transports(monkeypatch: pytest.MonkeyPatch):
    heavy = HeavyTransport()
    monkeypatch.setattr(build_module, "transports", lambda *_: {"heavy": lambda region: heavy})
    monkeypatch.setattr(footprint.psutil, "Process", lambda: heavy)
    built = build(settings(), "w", "1", 1, lambda _: None, KVEventLog(), lambda *_: None)
    built.ranks.regions[0].close()
    parts = built.footprint
    assert parts.weights_nbytes + parts.kv_nbytes + parts.other_nbytes == heavy.NBYTES


class Exited(Exception):
    """Raised where the process would end: nothing after it happens."""


def test_while_a_step_hangs_its_memory_stays(monkeypatch: pytest.MonkeyPatch):
    """1. A step takes longer than the worker waits for it. 2. The worker ends with its regions open: the
    engine's thread may still write into them."""

    def exit_(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(build_module.os, "_exit", exit_)
    built = build(settings(), "w", "1", 1, lambda _: None, KVEventLog(), lambda *_: None)
    monkeypatch.setattr(built.loop, "stop", lambda: False)
    with pytest.raises(Exited, match="1"):
        built.close()
    assert built.ranks.regions[0].block(0)
    monkeypatch.setattr(built.loop, "stop", lambda: True)
    built.close()
    with pytest.raises(ValueError, match="the region is closed"):
        built.ranks.regions[0].block(0)


class TestWaitingForTheEnd:
    """`until_asked` sees the engine's thread die; a signal is the other way to end."""

    @pytest.fixture
    def host(self) -> Any:
        return SimpleNamespace(built=SimpleNamespace(failed=False))

    async def test_a_signal(self, host: Any):
        stop = asyncio.Event()
        waiting = asyncio.create_task(until_asked(stop, host))
        await asyncio.sleep(0)
        stop.set()
        assert await asyncio.wait_for(waiting, 0.1) is True

    async def test_the_engine_dies(self, host: Any):
        waiting = asyncio.create_task(until_asked(asyncio.Event(), host))
        await asyncio.sleep(0)
        host.built.failed = True
        assert await asyncio.wait_for(waiting, 1.0) is False
