"""The manifests: nothing is wrong with any overlay, and whatever could be wrong would be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_command_lines import outcomes
from made_certificates import Authority

from deploy.check.__main__ import main, problems, rule_problems
from deploy.check.pods import Document, pods
from deploy.check.process import PLACE, SETTINGS_MOUNT, Surroundings, arguments, environment, mounted_config
from deploy.check.render import K8S, documents
from deploy.check.schemas import core_problems, custom_problems, validator

ALL = "cpu + monitoring + networkpolicy + redis-external + tls"
OVERLAYS = ["cpu", "disaggregatedset", "gateway", "hpa", "keda", "nvidia", "nvidia-rdma"]

Break = Callable[[list[Document]], object]


def test_every_overlay_is_there(rendered: dict[str, str]):
    assert [name for name in rendered if "+" not in name] == OVERLAYS
    assert ALL in rendered


def test_nothing_is_wrong(rendered: dict[str, str]):
    assert {name: list(problems(text)) for name, text in rendered.items()} == {name: [] for name in rendered}


def find(objects: list[Document], kind: str, name: str) -> Document:
    return next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))


def pod_of(objects: list[Document], role: str) -> dict[str, Any]:
    return find(objects, "Deployment", f"baton-{role}")["spec"]["template"]["spec"]


def container(objects: list[Document], role: str = "decode") -> dict[str, Any]:
    return pod_of(objects, role)["containers"][0]


def settings_map(objects: list[Document]) -> Document:
    return next(each for each in objects if each["kind"] == "ConfigMap" and "baton.toml" in each["data"])


def settings(objects: list[Document]) -> dict[str, str]:
    return settings_map(objects)["data"]


def spec(kind: str, name: str) -> Callable[[list[Document]], dict[str, Any]]:
    return lambda objects: find(objects, kind, name)["spec"]


def put(place: Callable[[list[Document]], dict[str, Any]], **values: Any) -> Break:
    return lambda objects: place(objects).update(values)


def drop(place: Callable[[list[Document]], dict[str, Any]], key: str) -> Break:
    return lambda objects: place(objects).pop(key)


def edit_settings(old: str, new: str) -> Break:
    def edit(objects: list[Document]) -> None:
        data = settings(objects)
        assert old in data["baton.toml"]
        data["baton.toml"] = data["baton.toml"].replace(old, new)

    return edit


def replace_argument(role: str, old: str, new: str) -> Break:
    def edit(objects: list[Document]) -> None:
        args = container(objects, role)["args"]
        args[args.index(old)] = new

    return edit


def decode_spec(objects: list[Document]) -> dict[str, Any]:
    return pod_of(objects, "decode")


def decode_deployment(objects: list[Document]) -> dict[str, Any]:
    return find(objects, "Deployment", "baton-decode")["spec"]


def port_of_policy(name: str, port: int) -> Break:
    return lambda objects: spec("NetworkPolicy", name)(objects)["ingress"][0]["ports"][0].update(port=port)


PLANTED: dict[str, tuple[Break, str]] = {
    "no probe": (drop(container, "startupProbe"), "it has no startupProbe"),
    "a probe of another port": (
        lambda objects: container(objects)["readinessProbe"]["httpGet"].update(port="probe"),
        "asks port probe, which it does not have",
    ),
    "no limits": (drop(container, "resources"), "it has no limits of memory"),
    "a moving tag": (put(container, image="baton-worker-cpu:latest"), "no tag that stays the same"),
    "no tag": (put(container, image="registry:5000/baton"), "no tag that stays the same"),
    "root": (put(decode_spec, securityContext={}), "it may run as root"),
    "a root that can be written": (put(container, securityContext={}), "readOnlyRootFilesystem: true"),
    "a capability without need": (
        lambda objects: container(objects)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
        "adds the capabilities IPC_LOCK",
    ),
    "a token of the API server": (drop(decode_spec, "automountServiceAccountToken"), "gets a token for the API"),
    "the host's network": (put(decode_spec, hostNetwork=True), "it has hostNetwork"),
    "too short a grace": (put(decode_spec, terminationGracePeriodSeconds=30), "take 137 s"),
    "too long a drain": (edit_settings("drain_timeout_s = 120", "drain_timeout_s = 300"), "take 317 s"),
    "no preStop": (drop(container, "lifecycle"), "it has no preStop sleep"),
    "a router that cuts its requests": (
        replace_argument("router", "--drain-timeout-s=600", "--drain-timeout-s=60"),
        "cut off before its longest request",
    ),
    "a renamed flag": (replace_argument("prefill", "--probe-port=7001", "--probes-port=7001"), "--probes-port is not"),
    "a renamed setting": (edit_settings("itl_slo_ms", "tpot_slo_ms"), "tpot_slo_ms is not a setting"),
    "a renamed variable": (
        lambda objects: container(objects)["env"][0].update(name="BATON_WORKER_NAME"),
        "BATON_WORKER_NAME is not a setting",
    ),
    "a variable used too early": (
        lambda objects: container(objects)["env"].insert(0, {"name": "BATON_ADVERTISE", "value": "$(POD_IP):7000"}),
        "which is not defined before it",
    ),
    "another port in the flags": (
        replace_argument("decode", "--listen=$(POD_IP):7000", "--listen=$(POD_IP):7002"),
        "its process listens on 7002",
    ),
    "an unknown Secret": (
        lambda objects: container(objects)["env"][-1]["valueFrom"]["secretKeyRef"].update(name="batons"),
        "which the docs do not name",
    ),
    "a volume that is not there": (
        lambda objects: container(objects)["volumeMounts"][0].update(name="shmem"),
        "mounts the volume shmem",
    ),
    "no ConfigMap": (
        lambda objects: objects.remove(settings_map(objects)),
        "is not among the objects",
    ),
    "a surge of prefill workers": (
        put(lambda objects: spec("Deployment", "baton-prefill")(objects)["strategy"]["rollingUpdate"], maxSurge=1),
        "another GPU",
    ),
    "decode workers that go first": (
        put(lambda objects: decode_deployment(objects)["strategy"]["rollingUpdate"], maxUnavailable=1),
        "before its successor serves",
    ),
    "all on one node": (drop(decode_spec, "topologySpreadConstraints"), "may all be on one node"),
    "no budget": (
        lambda objects: objects.remove(find(objects, "PodDisruptionBudget", "baton-decode")),
        "0 PodDisruptionBudgets select its pods",
    ),
    "a budget that lets nobody go": (
        put(spec("PodDisruptionBudget", "baton-decode"), maxUnavailable=0),
        "it lets no pod go",
    ),
    "a selector that misses": (
        put(lambda objects: decode_deployment(objects)["selector"], matchLabels={"app": "x"}),
        "does not match its pods' labels",
    ),
    "a selector that takes others' pods": (
        put(lambda objects: decode_deployment(objects)["selector"], matchLabels={"baton-worker": "true"}),
        "matches the pods of Deployment/baton-prefill too",
    ),
    "a Service of nobody": (put(spec("Service", "baton-router"), selector={"app": "x"}), "it selects no pod"),
    "a Service's port that nobody has": (
        lambda objects: spec("Service", "baton-router")(objects)["ports"][0].update(targetPort="web"),
        "has no port web",
    ),
    "a headless Service's port that is not the pod's": (
        lambda objects: spec("Service", "baton-workers")(objects)["ports"][0].update(port=80),
        "its port 80 is not translated",
    ),
    "discovery by another name": (edit_settings("dns://baton-workers", "dns://workers"), "is no headless Service"),
    "discovery of half": (
        put(spec("Service", "baton-workers"), selector={"app.kubernetes.io/component": "decode"}),
        "it lists decode; prefill and decode workers",
    ),
    "a policy of another port": (port_of_policy("baton-router", 80), "Deployment/baton-router has no port 80"),
    "a policy of another range": (
        lambda objects: container(objects, "prefill")["env"].remove(
            next(e for e in container(objects, "prefill")["env"] if e["name"] == "UCX_TCP_PORT_RANGE")
        ),
        "UCX_TCP_PORT_RANGE of Deployment/baton-prefill is None",
    ),
    "a policy that opens all": (
        lambda objects: spec("NetworkPolicy", "baton-decode")(objects)["ingress"][0].pop("ports"),
        "a rule opens every port",
    ),
    "a policy for a peer that is not there": (
        lambda objects: spec("NetworkPolicy", "baton-decode")(objects)["ingress"][0].update(
            {"from": [{"podSelector": {"matchLabels": {"app": "x"}}}]}
        ),
        "no pod has the labels",
    ),
    "a monitor of another port": (
        lambda objects: spec("PodMonitor", "baton-workers")(objects)["podMetricsEndpoints"][0].update(port="web"),
        "has a port web",
    ),
}  # fmt: skip


def broken(text: str, change: Break, judge: Callable[[list[Document]], Iterator[str]]) -> list[str]:
    objects = documents(text)
    change(objects)
    return list(judge(objects))


def custom(objects: list[Document]) -> Iterator[str]:
    script = validator()
    assert script
    return custom_problems(yaml.safe_dump_all(objects), script)


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_error_is_found(rendered: dict[str, str], what: str):
    change, sentence = PLANTED[what]
    found = broken(rendered[ALL], change, rule_problems)
    assert any(sentence in problem for problem in found), found


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"replica": 3}, "Additional properties are not allowed"),
        ({"replicas": "many"}, "'many' is not of type"),
    ],
)
def test_a_planted_error_of_kubernetes_own_kinds_is_found(
    rendered: dict[str, str], values: dict[str, Any], sentence: str
):
    found = broken(rendered["cpu"], put(decode_deployment, **values), core_problems)
    assert any(sentence in problem for problem in found), found


def trigger(objects: list[Document], number: int) -> dict[str, Any]:
    return find(objects, "ScaledObject", "baton-decode")["spec"]["triggers"][number]


SCALERS: dict[str, tuple[Break, str]] = {
    "a metric that nobody exports": (
        lambda objects: trigger(objects, 0)["metadata"].update(query="sum(baton_kv_usage)"),
        "nobody exports baton_kv_usage",
    ),
    "a query of nothing": (lambda objects: trigger(objects, 0)["metadata"].update(query="up"), "names no metric"),
    "nobody to scale": (
        lambda objects: spec("ScaledObject", "baton-decode")(objects)["scaleTargetRef"].update(name="x"),
        "there is no Deployment x",
    ),
    "replicas that are set back": (put(decode_deployment, replicas=2), "`replicas` sets back"),
    "nothing to decide": (put(spec("ScaledObject", "baton-decode"), maxReplicaCount=2), "leave nothing to decide"),
}  # fmt: skip


@pytest.mark.parametrize("what", SCALERS)
def test_a_planted_error_of_a_scaler_is_found(rendered: dict[str, str], what: str):
    change, sentence = SCALERS[what]
    found = broken(rendered["keda"], change, rule_problems)
    assert any(sentence in problem for problem in found), found


@pytest.mark.skipif(validator() is None, reason="needs the custom resources' schemas: BATON_SHARED")
@pytest.mark.parametrize(
    ("overlay", "kind", "name"),
    [
        ("keda", "ScaledObject", "baton-decode"),
        ("gateway", "HTTPRoute", "baton"),
        ("gateway", "Gateway", "baton"),
        ("disaggregatedset", "DisaggregatedSet", "baton"),
        (ALL, "PodMonitor", "baton-workers"),
        (ALL, "ServiceMonitor", "baton-router"),
    ],
)
def test_a_planted_error_of_a_custom_resource_is_found(
    rendered: dict[str, str], overlay: str, kind: str, name: str
):
    found = broken(rendered[overlay], put(spec(kind, name), fieldThatNobodyKnows=1), custom)
    assert any("fieldThatNobodyKnows" in problem for problem in found), found


def test_a_custom_resource_without_a_schema_is_told(rendered: dict[str, str]):
    if validator() is None:
        pytest.skip("needs the custom resources' schemas: BATON_SHARED")
    extra = {"apiVersion": "example.x-k8s.io/v1", "kind": "Thing", "metadata": {"name": "a"}}
    assert "1 custom resources, but 0 were checked" in broken(
        rendered["cpu"], lambda objects: objects.append(extra), custom
    )


def test_the_command_says_what_it_could_not_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Without the schemas of custom resources it passes, and says in so many words what it left out."""
    monkeypatch.delenv("BATON_SHARED", raising=False)
    k8s = tmp_path / "k8s"
    (k8s / "overlays").mkdir(parents=True)
    (k8s / "overlays/gateway").symlink_to(K8S / "overlays/gateway")
    (k8s / "overlays/cpu").symlink_to(K8S / "overlays/cpu")
    (k8s / "components").mkdir()
    assert main(k8s) == 0
    said = capsys.readouterr().out
    assert "2 custom resources NOT checked" in said
    assert "SKIPPED: custom resources against their schemas" in said


def test_the_command_fails_on_what_kustomize_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "overlays/broken").mkdir(parents=True)
    (tmp_path / "overlays/broken/kustomization.yaml").write_text("resources: [absent.yaml]\n")
    assert main(tmp_path) == 1
    assert "absent.yaml" in capsys.readouterr().out


def command_lines(name: str, text: str, folder: Path, authority: Authority) -> Iterator[tuple[str, Any]]:
    """Each pod's command line and environment, with the files that it reads in `folder`."""
    objects = documents(text)
    https, cluster = folder / "https", folder / "cluster"
    for place, server_name in ((https, "baton-router"), (cluster, "baton-cluster")):
        place.mkdir(parents=True)
        cert, key = authority.issue(f"{place.name}-{folder.name}", server_name)
        for file, source in (("tls.crt", cert), ("tls.key", key), ("ca.crt", authority.path)):
            (place / file).write_bytes(Path(source).read_bytes())
    secret = "0123456789abcdef" * 2
    secrets = {("baton", key): secret for key in ("api-key", "cluster-token", "redis-password")}
    secrets["baton-redis", "url"] = "rediss://:password@redis.example:6380/1"
    for pod in pods(objects):
        if pod.role == "redis":
            continue
        mount = folder / pod.owner.replace("/", "-")
        mount.mkdir()
        for file, content in mounted_config(pod, objects).items():
            (mount / file).write_text(content)
        paths = {
            SETTINGS_MOUNT: str(mount),
            "/etc/baton-https": str(https),
            "/etc/baton-cluster-tls": str(cluster),
        }
        around = Surroundings(PLACE, secrets, paths)
        variables = environment(pod.containers[0], around)
        yield f"{name}: {pod.owner}", (arguments(pod.containers[0], variables, around), variables)


def test_every_command_line_is_one_that_the_processes_take(rendered: dict[str, str], tmp_path: Path):
    """Flags, variables, settings files, certificates, and settings that would not go together."""
    authority = Authority(tmp_path / "ca")
    lines = {
        where: line
        for number, (name, text) in enumerate(rendered.items())
        for where, line in command_lines(name, text, tmp_path / str(number), authority)
    }
    assert len(lines) == 3 * len(rendered)
    found = dict(zip(lines, outcomes(list(lines.values())), strict=True))
    assert found == dict.fromkeys(lines, (0, ""))


def test_a_renamed_flag_is_refused():
    (outcome,) = outcomes([(["decode", "--listen=10.0.0.1:7000", "--probe-prt=7001"], {})])
    assert outcome == (2, "baton: --probe-prt is not a setting; did you mean --probe-port?")
