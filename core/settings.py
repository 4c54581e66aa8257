"""Every setting, declared once: defaults < TOML file (`--config`) < environment (`BATON_...`) < flags.

The command line, the environment names, `baton config` and the docs are all made from this class.
A setting is frozen; a change is a new value (`model_copy`).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from core.errors import ConfigError
from core.kv import BLOCK_SIZES

ENV_PREFIX = "BATON_"
SECRETS = ("api_key", "api_keys", "cluster_token", "discovery", "redis_url")
"""Settings that hold keys or passwords: in no message and no process list."""

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 2**10, "m": 10**6, "mb": 10**6, "mib": 2**20}
_UNITS |= {"g": 10**9, "gb": 10**9, "gib": 2**30, "t": 10**12, "tb": 10**12, "tib": 2**40}


def parse_nbytes(value: object) -> object:
    """`2GiB`, `500 MB`, `1048576` -> bytes. Leaves what it cannot read to the type check."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace("_", "")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        return value


def _known_block_size(value: int) -> int:
    if value not in BLOCK_SIZES:
        raise ValueError(f"should be one of {', '.join(map(str, BLOCK_SIZES))}")
    return value


NBytes = Annotated[int, BeforeValidator(parse_nbytes)]
BlockSize = Annotated[int, AfterValidator(_known_block_size)]


class Settings(BaseModel):
    """All settings of all processes. Names are the field's usual ones where such exist."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # model
    model: str = Field("", description="GGUF file or Hugging Face directory; empty = the embedded model")
    served_model_name: str = Field("", description="name in the API; empty = from the model's files")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="compute dtype")
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8 = weights and the inputs of products in 8 bits (CPU)"
    )
    kv_cache_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "k8v4"] = Field(
        "auto",
        description="KV dtype; auto = compute dtype; k8v4 = 8-bit keys, 4-bit values; int8 and k8v4 on a CPU",
    )
    kv_quant_skip_layers: str = Field(
        "",
        description="layers such as 0,27-29 that hold bf16 in a KV cache of fewer bits (CPU); empty = none",
    )
    max_model_len: int | None = Field(None, ge=2, description="longest prompt + answer in tokens")
    cache_dir: str = Field("~/.cache/baton", description="where converted weights are kept")

    # engine
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = a GPU where torch finds one")
    deterministic: bool = Field(
        False,
        description="start only where a request's tokens do not depend on its batch: native CPU kernels",
    )
    enforce_eager: bool = Field(False, description="on a GPU, run decode steps without captured graphs")
    block_size: BlockSize = Field(16, description="tokens per KV block: 8, 16, 32 or 64")
    num_blocks: int | None = Field(None, ge=2, description="blocks of the KV pool, instead of bytes")
    kv_cache_memory_bytes: NBytes | None = Field(
        None,
        ge=1,
        description="bytes of one worker's KV pool; without it 1 GiB on a CPU, on a GPU what "
        "--gpu-memory-utilization leaves",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a GPU's memory that its workers fill with weights, activations and KV pools; "
        "without it 0.9. Given on a CPU, the share of the free RAM that one worker's activations and KV pool "
        "take. --num-blocks and --kv-cache-memory-bytes come first",
    )
    workers_per_gpu: int = Field(
        1, ge=1, description="workers that share a GPU's memory evenly; `baton serve` counts its own"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="processes over which one worker splits the model, by KV heads (CPU)"
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences running at once")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="token budget of one step; without it 256 on a CPU, 2048 on a GPU"
    )
    max_waiting: int = Field(1024, ge=1, description="requests a worker queues before it says busy")
    enable_prefix_caching: bool = Field(True, description="reuse KV blocks of equal prefixes")

    # workers
    worker_id: str = Field("", description="unique name of a worker; empty = its role and address")
    listen: str = Field("127.0.0.1:0", description="host:port of a worker's gRPC server; port 0 = any")
    advertise: str = Field("", description="host:port others reach it at; empty = --listen")
    probe_port: int = Field(0, ge=0, le=65535, description="HTTP port of /health /ready /metrics; 0 = any")
    cpu_threads: int | None = Field(
        None, ge=1, description="compute threads, of each rank; default: its cores"
    )
    cpu_affinity: str = Field("", description="cores such as 0,2-3; empty = all this process may use")

    # handoff
    transport: Literal["auto", "shm", "nixl", "collective"] = Field(
        "auto", description="how KV bytes move; auto = shm, and nixl to other hosts"
    )
    lease_s: float = Field(20.0, gt=0, description="how long prefilled blocks wait without a sign of life")
    source_timeout_s: float = Field(60.0, gt=0, description="longest silence of a prefill worker")
    min_remote_tokens: int = Field(64, ge=0, description="fewer tokens than this are always computed here")

    # between processes of a cluster
    cluster_token: str = Field(
        "",
        description="secret that router and workers show each other, best in the environment; empty = none",
    )
    cluster_tls_cert: str = Field(
        "", description="PEM of this process's certificate, for mutual TLS between router and workers"
    )
    cluster_tls_key: str = Field("", description="PEM of its key")
    cluster_tls_ca: str = Field("", description="PEM of the CA that has signed all their certificates")
    cluster_tls_name: str = Field(
        "", description="name that all their certificates carry; empty = the host in each address"
    )
    transfer_hosts: str = Field(
        "",
        description="hosts and networks (10.0.0.0/8) of prefill workers that a decode worker may connect to; "
        "empty = all that a router names",
    )

    # tiers below the KV pool; each is absent without its size, directory or URL
    host_cache_bytes: NBytes = Field(0, ge=0, description="host RAM of one worker for KV blocks; 0 = none")
    disk_cache_dir: str = Field("", description="directory of KV blocks, one worker's alone; empty = none")
    disk_cache_bytes: NBytes = Field(4 * 2**30, ge=1, description="cap on everything in disk_cache_dir")
    redis_url: str = Field(
        "", description="Redis for KV blocks, shared; `baton serve` starts one for local://1GiB; empty = none"
    )
    redis_ttl_s: float = Field(3600.0, ge=1, description="how long Redis keeps a block that nobody asks for")
    tier_order: str = Field("host,disk,redis", description="which tier is asked first")
    store_policy: Literal["write-through", "second-hit", "on-evict"] = Field(
        "second-hit", description="when a block goes to disk and Redis"
    )
    tier_timeout_s: float = Field(0.5, gt=0, description="longest silence of disk or Redis before a miss")

    # router and launcher
    host: str = Field("127.0.0.1", description="address the router listens on")
    port: int = Field(8000, ge=0, le=65535, description="port the router listens on; 0 = any")
    discovery: str = Field(
        "",
        description="where workers are: static://host:port,host:port | dns://name:port | "
        "dns://_service._tcp.name (SRV) | redis://[:password@]host:port/db | ray://head:6379/namespace; "
        "a worker with the same redis:// or ray:// announces itself there",
    )
    discovery_poll_s: float = Field(2.0, gt=0, description="seconds between looks at DNS, Redis or Ray")
    discovery_lease_s: float = Field(
        15.0,
        ge=1,
        description="how long an announced worker is known after its last sign of life, and a set of workers "
        "after an empty answer",
    )
    prefill: int = Field(1, ge=0, description="prefill workers that `baton serve` starts")
    decode: int = Field(1, ge=1, description="decode workers that `baton serve` starts")
    restart_workers: bool = Field(True, description="`baton serve` starts a dead worker again")
    start_timeout_s: float = Field(300.0, gt=0, description="longest start-up of one process")
    api_key: str = Field("", description="key that clients must send; empty = none")
    api_keys: str = Field(
        "", description="named keys NAME:KEY,NAME:KEY; best as BATON_API_KEYS, which shows in no process list"
    )
    api_keys_file: str = Field(
        "", description="TOML file of named keys with their limits, read again on SIGHUP; empty = none"
    )
    admin_host: str = Field("127.0.0.1", description="address of the router's admin port")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the router's admin routes, which are nowhere else; 0 = any; without it none",
    )
    ssl_certfile: str = Field("", description="PEM of the router's certificate, for HTTPS; empty = HTTP")
    ssl_keyfile: str = Field("", description="PEM of its key; empty = it lies in ssl_certfile")
    ssl_ca_certs: str = Field(
        "", description="PEM of the CA whose certificates clients must show (mutual TLS); empty = none"
    )
    max_header_bytes: NBytes = Field(
        64 * 2**10, ge=1024, description="largest request line and headers together"
    )
    max_body_bytes: NBytes = Field(8 * 2**20, ge=1, description="largest request body")
    max_concurrent_requests: int = Field(
        2048, ge=1, description="requests in the router, those that wait among them, before it says busy"
    )
    max_queued_requests: int = Field(
        1024, ge=0, description="requests that wait in the router while no worker has room; 0 = none waits"
    )
    queue_timeout_s: float = Field(60.0, gt=0, description="how long a request may wait there")
    reject_slo_factor: float = Field(
        3.0,
        ge=0,
        allow_inf_nan=False,
        description="a request whose first token is expected later than so many times its target is refused; "
        "0 = never",
    )
    ttft_slo_ms: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="target of the first token in ms, planned for; 0 = none"
    )
    itl_slo_ms: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="target of each further token in ms, planned for; 0 = none",
    )
    request_record_bytes: NBytes = Field(
        16 * 2**20, ge=0, description="memory of a router for records of requests that are over; 0 = none"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="longest time a request may take")
    max_resumes: int = Field(3, ge=0, description="how often one prompt goes on at another worker; 0 = never")
    resume_timeout_s: float = Field(
        30.0, ge=0, description="how long a prompt whose decode worker was lost looks for another one"
    )
    step_timeout_s: float = Field(
        30.0, gt=0, description="a worker silent for longer is not ready, a rank of it lost"
    )
    special_tokens_in_chat: bool = Field(
        False, description="let control tokens written in chat messages act as control tokens"
    )
    shutdown_grace_s: float = Field(
        2.0,
        ge=0,
        le=300,
        description="how long a process that is leaving still takes new work, until all have heard; "
        "no time after SIGINT",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="how long running requests may finish after that, before they are cut"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_format: Literal["auto", "console", "json"] = Field("auto", description="auto = console on a terminal")
    faults: str = Field("", description="fault points for tests: name[@count]=raise|delay:SECONDS|hold:/PATH")


class Origin(BaseModel):
    """Where an effective value came from: `default`, `file PATH`, `environment NAME` or `flag --x`."""

    model_config = ConfigDict(frozen=True)
    value: Any
    source: str


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
) -> tuple[Settings, dict[str, Origin]]:
    """Merge the four levels. `flags` holds only those given.

    Raises ConfigError for an unknown key (naming the nearest known one), an unreadable file or a
    value of the wrong kind.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = config or environ.get(ENV_PREFIX + "CONFIG")
    if path:
        for key, value in _read_toml(path).items():
            name = key.replace("-", "_")
            values[name], sources[name] = value, f"file {path}"
            _known(name, f"{path}: {key}")
    for key, value in environ.items():
        if key.startswith(ENV_PREFIX) and key not in NOT_SETTINGS:
            name = key.removeprefix(ENV_PREFIX).lower()
            _known(name, f"environment variable {key}")
            values[name], sources[name] = value, f"environment {key}"
    for name, value in (flags or {}).items():
        values[name], sources[name] = value, f"flag --{name.replace('_', '-')}"
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        got = "" if name in SECRETS else f" (got {first['input']!r})"
        raise ConfigError(
            f"setting {name}, from {sources.get(name, 'default')}: {first['msg']}{got}"
        ) from None
    return settings, {
        name: Origin(value=getattr(settings, name), source=sources.get(name, "default"))
        for name in Settings.model_fields
    }


NOT_SETTINGS = {ENV_PREFIX + "CONFIG", ENV_PREFIX + "SHARED", ENV_PREFIX + "PARENT_PID"}


def _known(name: str, where: str) -> None:
    if name in Settings.model_fields:
        return
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(Settings.model_fields))}"
    raise ConfigError(f"{where} is not a setting{hint}")


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} is not valid TOML: {error}") from None
