import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kv_owner import make_transport
from tier_fixtures import (  # noqa: F401
    impatient,
    make_disk_tier,
    make_redis_tier,
    redis_server,
    shared_redis,
    start_redis,
)

from core import faults
from kvtransfer.region import Region
from kvtransfer.transport import Transport

HERE = Path(__file__).parent
BLOCK_NBYTES = 64 * 1024
NUM_BLOCKS = 32


class Owner:
    """A process that owns a region per rank with known random bytes (`kv_owner.py`).

    `incarnation`: of the region; of several, with spaces between, when there are several ranks.
    `checksums`: of all blocks of rank 0, then of rank 1, and so on.
    """

    def __init__(self, transport: str, incarnation: str, num_blocks: int, block_nbytes: int) -> None:
        root = str(HERE.parent.parent)
        self.process = subprocess.Popen(
            [
                sys.executable,
                HERE / "kv_owner.py",
                transport,
                str(num_blocks),
                str(block_nbytes),
                *incarnation.split(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the owner did not start"
        said = json.loads(line)
        self.offers = [bytes.fromhex(offer) for offer in said["offers"]]
        self.offer = self.offers[0]
        self.checksums: list[int] = said["checksums"]
        self.pid = self.process.pid

    def fill(self, block: int, value: int, rank: int = 0) -> None:
        """Overwrite one block; returns when it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"fill {rank} {block} {value}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def stop(self) -> None:
        """SIGSTOP, and wait until all of its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def start_owner() -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def start(
        transport: str,
        incarnation: str = "life-1",
        num_blocks: int = NUM_BLOCKS,
        block_nbytes: int = BLOCK_NBYTES,
    ) -> Owner:
        owners.append(Owner(transport, incarnation, num_blocks, block_nbytes))
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


@pytest.fixture(scope="session")
def living_owners() -> Iterator[dict[str, Owner]]:
    """One owner per transport for all tests that leave it alive; started when first asked for."""
    owners = _Living()
    yield owners
    for owner in owners.values():
        owner.close()


class _Living(dict[str, Owner]):
    def __missing__(self, transport: str) -> Owner:
        self[transport] = Owner(transport, "life-1", NUM_BLOCKS, BLOCK_NBYTES)
        return self[transport]


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create(NUM_BLOCKS, BLOCK_NBYTES, "reader-1")
    yield region
    region.close()


@pytest.fixture(params=["shm", "nixl", "collective"])
def transport(request: pytest.FixtureRequest, region: Region) -> Iterator[Transport]:
    transport = make_transport(request.param, region, "reader")
    yield transport
    transport.close()


@pytest.fixture
def set_faults() -> Iterator[Callable[[str], None]]:
    yield faults.configure
    faults.configure("")
