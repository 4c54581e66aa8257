"""KV over torch.distributed, point to point: Gloo between hosts, NCCL between GPUs.

Unlike with the other transports the owner takes part: a thread per reader answers each request with the
blocks asked for. A read lands in staging memory and is copied to the local blocks once it is complete,
so nothing that arrives late can touch them: every read leaves its blocks quiet.
"""

from __future__ import annotations

import atexit
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from core.errors import ConfigError, PeerLost
from core.log import get
from kvtransfer.collective_link import OWNER, READER, Control, Group, load_torch
from kvtransfer.offers import OFFER_VERSION, CollectiveOffer, decode, encode, require_same_blocks
from kvtransfer.region import Region
from kvtransfer.transport import require_pairs

MAX_READERS = 64
CONNECT_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 30.0
"""How long a reader may take to accept the blocks it asked for."""

_CLOSE_TIMEOUT_S = 2.0
_MAX_REQUEST = 1024  # blocks asked for at once
_MAX_IN_FLIGHT = 32  # blocks being sent, or received, at a time
_STAGING_NBYTES = 8 * 2**20

log = get("kvtransfer")


class CollectiveTransport:
    """`listen_host`: where readers are accepted, on a free port; `host`: what they are told."""

    name = "collective"

    def __init__(self, region: Region, listen_host: str, host: str) -> None:
        self._region = region
        self._listen_host = listen_host
        self._host = host
        self._server: _Server | None = None

    def offer(self) -> bytes:
        """The first call starts to listen. Raises ConfigError when it cannot."""
        if self._server is None:
            self._server = _Server(self._region, self._listen_host)
        return encode(
            CollectiveOffer(
                host=self._host,
                port=self._server.port,
                ticket=self._server.ticket,
                incarnation=self._region.incarnation,
                num_blocks=self._region.num_blocks,
                block_nbytes=self._region.block_nbytes,
            )
        )

    def connect(self, offer: bytes) -> CollectivePool:
        """Build a process group of two with the peer. Raises PeerLost or IncompatiblePeer."""
        peer = decode(offer, CollectiveOffer)
        require_same_blocks(peer, self._region)
        self._region.bind_thread()
        return CollectivePool(self._region, peer)

    def close(self) -> None:
        """Stop serving readers. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


class CollectivePool:
    """A connected owner's blocks. After a failed read it is closed: the group is of no more use."""

    def __init__(self, local: Region, peer: CollectiveOffer) -> None:
        self.local = local
        self._num_remote = peer.num_blocks
        self._ours = _tensor(local)
        try:
            connection = socket.create_connection((peer.host, peer.port), CONNECT_TIMEOUT_S)
        except OSError as error:
            raise PeerLost(f"cannot connect to {peer.host} port {peer.port}: {error}") from None
        self._control = Control(connection)
        try:
            hello = {"version": OFFER_VERSION, "incarnation": peer.incarnation, "ticket": peer.ticket}
            self._control.send(hello, CONNECT_TIMEOUT_S)
            self._group: Group | None = Group(self._control, READER, self._ours, CONNECT_TIMEOUT_S)
        except BaseException:
            self._control.close()
            raise

    def read(self, remote_ids: Sequence[int], local_ids: Sequence[int], timeout_s: float) -> None:
        """Raises PeerLost when closed, out of range, the peer is gone or did not deliver in time."""
        if self._group is None:
            raise PeerLost("the connection to this peer was closed; connect again")
        require_pairs(remote_ids, local_ids, self._num_remote, self.local.num_blocks)
        deadline = time.monotonic() + timeout_s
        self.local.bind_thread()
        try:
            for at in range(0, len(remote_ids), _MAX_REQUEST):
                asked = [int(i) for i in remote_ids[at : at + _MAX_REQUEST]]
                self._control.send({"blocks": asked}, deadline - time.monotonic())
                self._receive(self._group, local_ids[at : at + _MAX_REQUEST], deadline)
        except PeerLost:
            self.close()
            raise

    def _receive(self, group: Group, local_ids: Sequence[int], deadline: float) -> None:
        """Take what was asked for through staging memory, some blocks ahead of the copy."""
        nbytes = self.local.block_nbytes
        ahead = max(1, min(len(local_ids), _STAGING_NBYTES // nbytes, _MAX_IN_FLIGHT))
        staging = self._ours.new_empty((ahead, nbytes))
        works: deque[Any] = deque()
        for at in range(len(local_ids) + ahead):
            slot = staging[at % ahead]
            if at >= ahead:
                group.wait(works.popleft(), deadline)
                self._ours[local_ids[at - ahead]].copy_(slot)
            if at < len(local_ids):
                works.append(group.receive(slot))
        if self._ours.is_cuda:
            load_torch().cuda.current_stream(self._ours.device).synchronize()

    def drain(self) -> bool:
        return True

    def close(self) -> None:
        self._group = None
        self._control.close()


class _Server:
    """Accepts readers, at most MAX_READERS, and serves each on a thread of its own. `ticket` goes out with
    the offer, which only peers are given whom the handshake let in."""

    def __init__(self, region: Region, listen_host: str) -> None:
        load_torch()
        self._region = region
        self.ticket = secrets.token_hex(16)
        self._blocks = _tensor(region)
        self._lock = threading.Lock()
        self._readers: dict[Control, threading.Thread] = {}
        family = socket.AF_INET6 if ":" in listen_host else socket.AF_INET
        try:
            self._listener = socket.create_server((listen_host, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"--transport collective cannot listen on {listen_host}: {error}; choose another --listen"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kv-collective", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        self._thread.join(_CLOSE_TIMEOUT_S)
        with self._lock:
            readers = dict(self._readers)
        for control in readers:
            control.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in readers.values():  # one that still sends holds the memory it sends from
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            control = Control(connection)
            thread = threading.Thread(
                target=self._serve, args=(control,), name="kv-collective-reader", daemon=True
            )
            with self._lock:
                is_full = len(self._readers) >= MAX_READERS
                if not is_full:
                    self._readers[control] = thread
            if is_full:
                self._refuse(control, f"it serves {MAX_READERS} readers already")
                control.close()
            else:
                thread.start()

    def _serve(self, control: Control) -> None:
        try:
            self._converse(control)
        except PeerLost as error:
            log.debug("collective.reader_left", reason=error.message)
        except Exception as error:
            log.error("collective.broke", exc_info=error)
        finally:  # after the group's end: no thread may be inside torch when the process leaves
            control.close()
            with self._lock:
                del self._readers[control]

    def _converse(self, control: Control) -> None:
        self._region.bind_thread()
        self._greet(control)
        group = Group(control, OWNER, self._blocks, CONNECT_TIMEOUT_S)
        while True:
            self._answer(group, control.receive(None).get("blocks"))

    def _greet(self, control: Control) -> None:
        hello, ours = control.receive(CONNECT_TIMEOUT_S), self._region.incarnation
        why = ""
        if hello.get("version") != OFFER_VERSION:
            why = f"it speaks version {OFFER_VERSION}, not {hello.get('version')!r}"
        elif hello.get("incarnation") != ours:
            why = f"it is incarnation {ours!r}, not {hello.get('incarnation')!r}: restarted"
        elif not secrets.compare_digest(str(hello.get("ticket")).encode(), self.ticket.encode()):
            why = "whoever reads must have been given the offer"
        if why:
            self._refuse(control, why)
            raise PeerLost(why)

    def _refuse(self, control: Control, why: str) -> None:
        log.warning("collective.refused", reason=why)
        with suppress(PeerLost):
            control.send({"refused": why}, CONNECT_TIMEOUT_S)

    def _answer(self, group: Group, asked: object) -> None:
        num_blocks = len(self._blocks)
        if not isinstance(asked, list) or len(asked) > _MAX_REQUEST:
            raise PeerLost("the reader's request is none")
        if not all(isinstance(i, int) and 0 <= i < num_blocks for i in asked):
            raise PeerLost(f"the reader asked for a block outside our pool of {num_blocks}")
        deadline = time.monotonic() + SEND_TIMEOUT_S
        works: deque[Any] = deque()
        for block in asked:
            if len(works) == _MAX_IN_FLIGHT:
                group.wait(works.popleft(), deadline)
            works.append(group.send(self._blocks[block]))
        while works:
            group.wait(works.popleft(), deadline)


def _tensor(region: Region) -> Any:
    """uint8 tensor `[num_blocks, block_nbytes]` over the region's own memory."""
    return load_torch().as_tensor(region.blocks)
