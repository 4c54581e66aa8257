"""One reader and one owner, joined at run time: a control connection and a process group of two.

    reader (rank 1)                          owner (rank 0)
    ---------------                          --------------
    connect                        ----->    accept
    {version, incarnation, ticket} ----->
                                   <-----    {store: port}, or {refused: why}
    both build the group through that store; it belongs to this pair alone
    {blocks: [...]}                ----->                         a read
                                   <=====    those blocks, in that order, over the group

The control connection is plain TCP with JSON frames, so an idle pair waits without torch, and a peer's
end shows as the end of the stream. What was measured of Gloo and shapes this file (torch 2.13): a
wait that runs out closes the pair of ranks for good, no byte arrives afterwards; `abort` and `shutdown`
do not end a wait that runs; a dead peer ends it at once; threads and sockets go with the last reference.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from core.errors import ConfigError, PeerLost

OWNER, READER = 0, 1
_MAX_FRAME_NBYTES = 64 * 1024
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))  # s, s, tries
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()
_MIN_WAIT_S = 0.001  # Gloo takes a wait of zero for one without end

Result = TypeVar("Result")


def load_torch() -> Any:
    """torch, imported by the first who needs it. Raises ConfigError without torch.distributed."""
    import torch.distributed

    if not torch.distributed.is_available():
        raise ConfigError("--transport collective needs a torch that was built with torch.distributed")
    return torch


class Control:
    """JSON objects over one TCP connection. All calls but `close` belong to one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def ours(self) -> str:
        """Address of this host on the way to the peer."""
        return self._socket.getsockname()[0]

    @property
    def theirs(self) -> str:
        return self._socket.getpeername()[0]

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Raises PeerLost when the peer is gone or takes nothing for `timeout_s`."""
        body = json.dumps(message).encode()
        try:
            self._socket.settimeout(max(timeout_s, _MIN_WAIT_S))
            self._socket.sendall(len(body).to_bytes(4, "little") + body)
        except OSError as error:
            raise PeerLost(f"the control connection to the peer broke: {error}") from None

    def receive(self, timeout_s: float | None) -> dict[str, Any]:
        """The next message; without a timeout it waits for as long as the peer lives.

        Raises PeerLost when the peer is gone, says nothing in time or something unreadable.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        nbytes = int.from_bytes(self._read(4, deadline), "little")
        if nbytes > _MAX_FRAME_NBYTES:
            raise PeerLost(f"the peer sent a control message of {nbytes} bytes; it is no worker of ours")
        try:
            message = json.loads(self._read(nbytes, deadline))
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise PeerLost("the peer sent a control message that cannot be read")
        return message

    def close(self) -> None:
        """Idempotent, from any thread; ends a `receive` that waits in another."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, nbytes: int, deadline: float | None) -> bytes:
        parts, missing = [], nbytes
        while missing:
            try:
                self._socket.settimeout(deadline and max(deadline - time.monotonic(), _MIN_WAIT_S))
                part = self._socket.recv(missing)
            except OSError as error:
                raise PeerLost(f"the control connection to the peer broke: {error}") from None
            if not part:
                raise PeerLost("the peer closed its connection or ended")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


class Group:
    """The process group of one pair: Gloo for blocks in host memory, NCCL for blocks on a GPU.

    It belongs to no global group, so a process may be in many. After any error it is of no more use.
    NCCL wants a GPU per rank and has not been run: nothing is known yet of how it meets a dead peer.
    """

    def __init__(self, control: Control, rank: int, blocks: Any, timeout_s: float) -> None:
        """Meets the peer; both sides call this. `blocks`: the tensor sent from or received for.

        Raises PeerLost when the peer does not come within `timeout_s`.
        """
        torch = load_torch()
        self._rank = rank
        build = _build_nccl if blocks.is_cuda else _build_gloo
        self._group: Any = _translated(lambda: build(torch.distributed, control, rank, timeout_s))

    def send(self, block: Any) -> Any:
        """Begin to send a tensor; it must stay as it is until `wait` returns."""
        return _translated(lambda: self._group.send([block], 1 - self._rank, 0))

    def receive(self, block: Any) -> Any:
        """Begin to receive into a tensor. Sends and receives of a pair match in their order."""
        return _translated(lambda: self._group.recv([block], 1 - self._rank, 0))

    def wait(self, work: Any, deadline: float) -> None:
        """Until that send or receive has ended; raises PeerLost at the deadline (`time.monotonic`)."""
        left = max(deadline - time.monotonic(), _MIN_WAIT_S)
        _translated(lambda: work.wait(timedelta(seconds=left)))


def _build_gloo(dist: Any, control: Control, rank: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=control.ours)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(_meet(dist, control, rank, timeout_s), rank, 2, options)


def _build_nccl(dist: Any, control: Control, rank: int, timeout_s: float) -> Any:
    """With blocking waits: they have a bound, and no watchdog ends this process for a peer's fault."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    store = _meet(dist, control, rank, timeout_s)
    with _environment:  # other groups of this process keep their own way to wait
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        finally:
            if before is None:
                del os.environ[_BLOCKING_WAIT]
            else:
                os.environ[_BLOCKING_WAIT] = before


def _meet(dist: Any, control: Control, rank: int, timeout_s: float) -> Any:
    """The key-value store over which the two ranks find each other; it lives in the owner."""
    if rank == READER:
        reply = control.receive(timeout_s)
        if "refused" in reply:
            raise PeerLost(f"the peer refuses to be read: {reply['refused']}")
        if not isinstance(port := reply.get("store"), int):
            raise PeerLost("the peer named no port to meet at")
        return dist.TCPStore(control.theirs, port, timeout=timedelta(seconds=timeout_s))
    family = socket.AF_INET6 if ":" in control.ours else socket.AF_INET
    listener = socket.create_server((control.ours, 0), family=family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        control.ours,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    control.send({"store": port}, timeout_s)
    return store


def _translated(call: Callable[[], Result]) -> Result:
    """torch raises RuntimeError of many kinds for a peer that is gone or late."""
    try:
        return call()
    except (RuntimeError, OSError) as error:
        raise PeerLost(f"the link to the peer failed: {str(error).splitlines()[0][:200]}") from None
