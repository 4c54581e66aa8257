"""What `baton serve` prints when everything is up."""

from __future__ import annotations

from typing import Any, cast

from rich.console import Console
from rich.table import Table

from core.settings import Settings
from services.children import Child

MIB = 2**20


def show_summary(settings: Settings, url: str, workers: list[Child]) -> None:
    """A table of the workers and a line to try, on stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(title=f"baton at {url}", title_justify="left")
    for column in (
        "worker",
        "pid",
        "on",
        "dtype",
        "weights",
        "activations",
        "other",
        "KV pool",
        "blocks",
        "tokens",
        "at max length",
    ):
        table.add_column(column, justify="left" if column in ("worker", "dtype", "on") else "right")
    reason = ""
    for worker in workers:
        body = worker.probe()
        parts = cast(dict[str, Any], body.get("footprint", {}))
        if not parts:
            table.add_row(worker.name, str(worker.pid), "", "not ready")
            continue
        kv_bytes = parts["bytes_per_token"]
        reason = (
            f"dtype {parts['dtype']}: {parts['dtype_reason']}; {kv_bytes} bytes of KV per token "
            f"in {parts['kv_dtype']}; "
            f"at max length: how many sequences of {parts['max_model_len']:,} tokens the pool holds"
        )
        place = parts["device"]
        if place == "cpu":
            place = ",".join(map(str, cast(list[int], body["cores"])))
        if parts["tensor_parallel_size"] > 1:
            place += f" (TP {parts['tensor_parallel_size']})"
        table.add_row(
            worker.name,
            str(worker.pid),
            place,
            parts["dtype"]
            if parts["quantization"] == "none"
            else f"{parts['dtype']}, {parts['quantization']}",
            f"{parts['weights_nbytes'] / MIB:.0f} MiB",
            f"{parts['activations_nbytes'] / MIB:.0f} MiB",
            f"{parts['other_nbytes'] / MIB:.0f} MiB",
            f"{parts['kv_nbytes'] / MIB:.0f} MiB",
            f"{parts['num_blocks']} x {settings.block_size}",
            f"{parts['num_tokens']:,}",
            f"{parts['concurrency']:.1f}",
        )
    console.print(table)
    if reason:
        console.print(reason, style="dim", highlight=False)
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if settings.api_key else ""
    print(
        f"\nTry it:\n  curl -sN {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
        '"max_tokens": 40, "temperature": 0, "stream": true}\'\n\nCtrl-C stops everything.',
        flush=True,
    )
