"""A tensor-parallel rank other than the first: `python -m services.worker.rank DESCRIPTOR`.

It does what rank 0 tells it over that socket (see `rank_link`), and ends with it. Torch is imported once
the cores are set.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from core import log
from core.errors import ConfigError, WorkerLost
from services import orphan
from services.worker import cpu
from services.worker.rank_link import COPY, POOL, Kind, Link, Order, silence_limit_s

_log = log.get("rank")


def main(descriptor: int) -> int:
    """Exit status: 0 when rank 0 ended it, 1 when a step broke, 2 for what the operator has to change."""
    orphan.end_with_parent(os.environ, signal.SIGKILL)
    link = Link(socket.socket(fileno=descriptor))
    first = link.receive()
    if first is None:
        return 0
    order = Order.model_validate_json(bytes(first.body))
    settings = order.settings
    log.configure(settings.log_level, settings.log_format, worker=settings.worker_id, rank=str(order.rank))
    try:
        _, threads = cpu.confine(settings, order.rank)
        _serve(link, order, threads)
    except ConfigError as error:
        with suppress(WorkerLost):  # rank 0 may have given up before
            link.send(Kind.FAILED, error.message.encode())
        return 2
    except WorkerLost as error:
        _log.error("rank.failed", error=error.message, cause=str(error.__cause__))
        return 1
    return 0


def _serve(link: Link, order: Order, threads: int) -> None:
    """Load the rank's part, then do as told until rank 0 closes the link."""
    import torch

    from checkpoint.open import open_checkpoint
    from engine import batch_bytes
    from engine.device import rank_device, resolve_device
    from engine.kernels.select import select_device_kernels, select_kernels
    from engine.kv_cache import KVCache
    from engine.models.registry import model_class
    from engine.models.shard import rank_config, rank_weights
    from engine.models.weights import load_weights, on_device
    from engine.parallel import Group, Meeting
    from engine.runner import ModelRunner
    from kvtransfer import device_share
    from kvtransfer.region import Region
    from kvtransfer.slices import rank_layout

    torch.set_num_threads(threads)
    settings, degree = order.settings, order.settings.tensor_parallel_size
    device = rank_device(resolve_device(settings.device), order.rank, degree)
    layout = rank_layout(order.kv_layout, degree)
    cache_dir = os.path.expanduser(settings.cache_dir)
    checkpoint = open_checkpoint(settings.model)
    whole = load_weights(checkpoint, order.dtype, cache_dir, quantization=settings.quantization)
    weights = rank_weights(checkpoint.config, whole, degree, order.rank)
    config = rank_config(checkpoint.config, degree)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        weights = on_device(weights, device)
        kernels = select_device_kernels(config, layout, order.dtype)
    else:
        kernels = select_kernels(config, layout, cache_dir)
    link.send(Kind.READY)
    if link.receive() is None:
        return
    limit_s = silence_limit_s(settings, device.type)
    group = Group(Meeting(limit_s, order.port), order.rank, degree, limit_s, device)
    model = model_class(config.architecture)(config, weights, kernels, order.max_model_len, group)
    runner = ModelRunner(model, KVCache(layout, 1, device=device))
    while (frame := link.receive()) is not None:
        match frame.kind:
            case Kind.RUN:
                runner.run(batch_bytes.decode(frame.body))
            case Kind.COPY:
                runner.copy_block(*COPY.unpack(frame.body))
            case Kind.POOL:
                (num_blocks,) = POOL.unpack(frame.body)
                if frame.fd is not None:
                    region = Region.adopt(frame.fd, num_blocks, layout.block_nbytes)
                    runner = ModelRunner(model, KVCache(layout, num_blocks, region.data))
                else:
                    runner = ModelRunner(model, KVCache(layout, num_blocks, device=device))
                    link.send(Kind.SHARED, device_share.exported(runner.cache.raw))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
