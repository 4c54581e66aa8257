from __future__ import annotations

import pytest
from router_fakes import FakeWorker, Script, fingerprint
from router_stack import stacked

from core.settings import Settings
from services.router.text import TextSide


@pytest.fixture(scope="session")
def text() -> TextSide:
    """The embedded model's text side; nothing changes it, so all tests share one."""
    return TextSide(Settings(), lambda where: None)


@pytest.fixture
def stack_of(text: TextSide):
    """`stack_of(script, prefill=1, **settings)`: an async context with one decode worker."""

    def make(
        script: Script | None = None,
        *,
        decode: int = 1,
        prefill: int = 0,
        blocks: int = 512,
        seats: int = 0,
        **settings: object,
    ):
        print_ = fingerprint(text.tokenizer_digest)
        workers = [
            FakeWorker(print_, script, worker_id=f"decode-{i}", total_blocks=blocks, max_num_seqs=seats)
            for i in range(decode)
        ]
        workers += [
            FakeWorker(print_, worker_id=f"prefill-{i}", role="prefill", total_blocks=blocks)
            for i in range(prefill)
        ]
        return stacked(text, workers, **settings)  # type: ignore[arg-type]

    return make
