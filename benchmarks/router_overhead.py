"""What the router adds to a request: HTTP through the router against the worker's session directly.

    python -m benchmarks.router_overhead [--requests 200]

Both ways ask the same idle decode worker for one token after a one-token prompt, in turn; the
difference of the medians is what HTTP and the router add. The client's own share of that shows in a
`GET /health` over the same connection; the router's is also given as its CPU time per request.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import ExitStack
from statistics import median, quantiles

import httpx
import psutil

from benchmarks.workers import Session, start_workers
from core.settings import Settings
from services.address import free_port
from services.children import Child, child_flags


async def measure(requests: int) -> None:
    cpu_s = 0.0
    settings = Settings.model_validate({"log_level": "warning", "kv_cache_memory_bytes": 2**28})
    with ExitStack() as stack:
        # As `baton serve` places them; the prefill worker idles and leaves its core to router and client.
        _, decode = start_workers(stack, ["prefill", "decode"], settings)
        port = free_port("127.0.0.1")
        flags = child_flags(settings, discovery=f"static://{decode.address}", port=port)
        router = Child("router", ["router", *flags], f"http://127.0.0.1:{port}/ready")
        router.start()
        stack.callback(router.wait, 15.0)
        stack.callback(router.terminate)
        for _ in range(300):
            router.probe()
            if router.ready:
                break
            await asyncio.sleep(0.1)
        session, direct, routed, floor = Session(decode), [], [], []
        process = psutil.Process(router.pid)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            body = {"prompt": [504], "max_tokens": 1, "temperature": 0}
            for i in range(requests + 20):
                if i == 20:
                    cpu_s = sum(process.cpu_times()[:2])
                await client.get("/health")
                floor_ended = time.perf_counter()
                await client.get("/health")
                started = time.perf_counter()
                floor.append((started - floor_ended) * 1e3)
                await session.run([504], 1)
                middle = time.perf_counter()
                (await client.post("/v1/completions", json=body)).raise_for_status()
                ended = time.perf_counter()
                if i >= 20:
                    direct.append((middle - started) * 1e3)
                    routed.append((ended - middle) * 1e3)
            cpu_s = sum(process.cpu_times()[:2]) - cpu_s
        await session.close()
    for name, times in (("direct", direct), ("routed", routed)):
        print(f"{name}: p50 {median(times):.2f} ms, p99 {quantiles(times, n=100)[98]:.2f} ms")
    added, client_ms = median(routed) - median(direct), median(floor)
    print(f"HTTP and router add {added:.2f} ms at p50 ({requests} requests each)")
    print(f"GET /health: p50 {client_ms:.2f} ms; the rest, {added - client_ms:.2f} ms, is the router's")
    print(f"router CPU: {cpu_s / requests * 1e3:.2f} ms a request, two GET /health included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=200)
    asyncio.run(measure(parser.parse_args().requests))


if __name__ == "__main__":
    main()
