"""Two ranks on two GPUs: sums and gathers over NCCL, and a pool that one allocates and both use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("there are no two CUDA devices", allow_module_level=True)

from engine.parallel import Group, Meeting
from kvtransfer import device_share

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
WIDTH = 150
OTHER_RANK = f"""
import sys, torch
from engine.parallel import Group, Meeting
from kvtransfer import device_share

device = torch.device("cuda", 1)
torch.cuda.set_device(device)
group = Group(Meeting({TIMEOUT_S}, int(sys.argv[1])), 1, 2, {TIMEOUT_S}, device)
assert group.all_reduce(torch.full((3,), 2.0, device=device)).tolist() == [3.0] * 3
group.join(torch.full((2, {WIDTH} - 96), 2.0, device=device), {WIDTH})
blocks = torch.arange(4, dtype=torch.uint8, device=device).repeat_interleave(64).view(4, 64)
print(device_share.exported(blocks).decode(), flush=True)
sys.stdin.readline()
assert blocks[2].tolist() == [7] * 64
group.barrier()
torch.cuda.synchronize()
"""


def test_two_ranks_meet_and_share_a_pool() -> None:
    meeting, device = Meeting(TIMEOUT_S), torch.device("cuda", 0)
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK, str(meeting.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert child.stdin
    assert child.stdout
    try:
        group = Group(meeting, 0, 2, TIMEOUT_S, device)
        assert group.all_reduce(torch.ones(3, device=device)).tolist() == [3.0] * 3
        whole = group.join(torch.ones(2, 96, device=device), WIDTH)
        assert whole.tolist() == [[1.0] * 96 + [2.0] * (WIDTH - 96)] * 2
        theirs = device_share.opened(child.stdout.readline(), 4, 64)
        assert theirs.device == torch.device("cuda", 1)
        assert theirs[3].tolist() == [3] * 64
        theirs[2] = 7
        torch.cuda.synchronize(1)
        child.stdin.write(b"\n")
        child.stdin.flush()
        group.barrier()
        torch.cuda.synchronize()
        assert child.wait(TIMEOUT_S) == 0
    finally:
        child.kill()
        child.wait()
