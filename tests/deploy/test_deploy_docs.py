"""The pages on sizing and troubleshooting name metrics, flags and sections that are there, and their sums are right."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

from core.settings import Settings
from deploy.check.queries import GOLDEN
from deploy.check.render import ROOT

SIZING, TROUBLES = (ROOT / "docs/deploy" / name for name in ("sizing.md", "troubleshooting.md"))
OTHER_FLAGS = {"threads", "skip-peers", "delete", "router"}
"""Of benchmarks and of commands that are no servers."""

pages = pytest.mark.parametrize("page", [SIZING, TROUBLES], ids=["sizing", "troubleshooting"])


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_every_metric_is_exported(page: Path):
    golden = {name for path in GOLDEN for name in path.read_text().split()}
    assert set(re.findall(r"\bbaton_[a-z_]+", page.read_text())) - golden == set()


@pages
def test_every_flag_is_one(page: Path):
    named = set(re.findall(r"--([a-z][a-z-]+)", page.read_text()))
    assert named - {field.replace("_", "-") for field in Settings.model_fields} - OTHER_FLAGS == set()


@pages
def test_every_link_leads_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.is_file(), target
        assert not anchor or anchor in anchors(other), target


def test_the_table_of_bytes_is_right():
    """30 x 2 x 3 x 64 x 2 = 23,040 and the like, and the tokens that whole blocks of 16 hold in 1 GiB."""
    sums = re.findall(r"\| ([\dx( +)]+) = ([\d,]+) \| ([\d,]+) \|", SIZING.read_text())
    assert len(sums) == 3
    for product, nbytes, tokens in sums:
        factors = product.replace("(64 x 1 + 2)", "66").split(" x ")
        each = int(nbytes.replace(",", ""))
        assert prod(map(int, factors)) == each
        assert 2**30 // (16 * each) * 16 == int(tokens.replace(",", ""))


def test_the_worked_example_is_right():
    text = SIZING.read_text()
    rate, tokens, answer, per_s, step_s, sequences = 10, 512, 100, 816, 0.031, 8
    prefill, decode = rate * tokens / per_s / 0.7, rate * answer * step_s / sequences / 0.75
    assert f"= {prefill:.1f}, so 9 workers" in text
    assert f"= {decode:.1f}, so 6 workers" in text
    assert f"= {prefill / rate:.3f} : {decode / rate:.3f} = {prefill / decode:.1f}, or 7 : 4" in text
