"""The images, as far as they can be judged where no Docker is: what they copy, install and run."""

from __future__ import annotations

import fnmatch
import http.server
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from deploy_command_lines import outcomes
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.check.dockerfile import Stage, stages
from deploy.check.pins import closure
from deploy.check.render import ROOT

DOCKER = ROOT / "deploy/docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

dockerfiles = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


def last(path: Path) -> Stage:
    return stages(path)[-1]


def pins() -> dict[str, str]:
    lines = [line for line in (DOCKER / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def wanted(path: Path) -> tuple[list[Requirement], set[str]]:
    """What the image's pip gets of this project: requirements and extras."""
    named = [word.strip("'") for stage in stages(path) for words in stage.installs for word in words]
    found = next(match for match in (re.fullmatch(r"\.\[(.*)\]", word) for word in named) if match)
    extras = set(found[1].split(","))
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for each in lists for text in each], extras


def test_there_are_three():
    assert [path.stem for path in FILES] == ["router", "worker-cpu", "worker-cuda"]


@dockerfiles
def test_hadolint_finds_nothing(path: Path):
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@dockerfiles
def test_every_base_has_a_tag_that_stays(path: Path):
    for stage in stages(path):
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[a-z0-9.-]*", stage.image), stage.image


@dockerfiles
def test_what_it_copies_is_there_and_in_the_context(path: Path):
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    names = {stage.name for stage in stages(path)}
    for stage in stages(path):
        for copy in stage.copies:
            if copy.stage:
                assert copy.stage in names
                continue
            for source in copy.sources:
                assert (ROOT / source).exists(), source
                assert any(
                    fnmatch.fnmatch(source.rstrip("/"), pattern) or source.startswith(pattern + "/")
                    for pattern in kept
                ), f".dockerignore leaves out {source}"


@dockerfiles
def test_it_runs_as_nobody_who_matters_and_says_how_it_fares(path: Path):
    stage = last(path)
    assert stage.user == "10001:10001"
    assert stage.env["HOME"] == "/var/cache/baton"
    *python, script, url = stage.healthcheck
    assert python == ["python"]
    assert script in [copy.target for copy in stage.copies]
    assert (DOCKER / Path(script).name).is_file()
    assert re.fullmatch(r"http://127\.0\.0\.1:(\d+)/live", url)[1] in map(str, stage.ports)


@dockerfiles
def test_its_command_line_is_one(path: Path):
    stage = last(path)
    assert stage.entrypoint == ["baton"]
    assert "baton" in PROJECT["scripts"]
    (outcome,) = outcomes([(stage.cmd, {})])
    assert outcome == (0, "")


@dockerfiles
def test_what_it_installs_has_one_version_that_fits(path: Path):
    """Of all that an extra wants, and of all that this wants in turn: is pinned, and the pin fits all of them."""
    direct, extras = wanted(path)
    versions = pins()
    for requirement in direct:
        pin = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} but {pin}"
    for requirement in direct:
        for name, users in closure(requirement.name, requirement.extras).items():
            for user in users:
                assert user.specifier.contains(versions[name], prereleases=True), (
                    f"{user}, but {versions[name]}"
                )
    assert ("worker" in extras) == ("worker" in path.stem)


def test_the_router_has_no_torch():
    direct, _ = wanted(DOCKER / "router.Dockerfile")
    needed = {canonicalize_name(requirement.name) for requirement in direct}
    for requirement in direct:
        needed |= set(closure(requirement.name, requirement.extras))
    assert not needed & {"torch", "nixl", "triton"}
    copied = {
        source for stage in stages(DOCKER / "router.Dockerfile") for c in stage.copies for source in c.sources
    }
    assert not copied & {"engine/", "kvtransfer/"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@dockerfiles
def test_pip_finds_it_all(path: Path):
    """torch's own wheels are left to the closure above: their index differs by image."""
    direct, _ = wanted(path)
    names = [str(requirement) for requirement in direct if requirement.name != "torch"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    subprocess.run([*command, "--constraint", DOCKER / "constraints.txt", *names], check=True)


class _Probe(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({"/live": 200}.get(self.path, 503))
        self.end_headers()

    def log_message(self, *_):
        pass


def test_the_healthcheck():
    server = http.server.HTTPServer(("127.0.0.1", 0), _Probe)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        status = {path: _healthcheck(url + path) for path in ("/live", "/hung")}
    finally:
        server.shutdown()
        server.server_close()
    assert status == {"/live": 0, "/hung": 1}
    assert _healthcheck(url) == 1


def _healthcheck(url: str) -> int:
    return subprocess.run([sys.executable, DOCKER / "healthcheck.py", url], check=False).returncode
