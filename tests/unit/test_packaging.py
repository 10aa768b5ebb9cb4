"""pyproject.toml and constraints.txt agree: each direct dependency is pinned, within its range."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
DIRECT = sorted(
    {
        *PROJECT["build-system"]["requires"],
        *PROJECT["project"]["dependencies"],
        *(line for lines in EXTRAS.values() for line in lines if not line.startswith("pfx[")),
    }
)


def pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text()
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("line", DIRECT)
def test_direct_dependency_is_pinned_within_its_range(line: str) -> None:
    requirement = Requirement(line)
    assert pins().get(canonicalize_name(requirement.name)) in requirement.specifier


def test_core_needs_four_packages_only() -> None:
    core = {Requirement(line).name for line in PROJECT["project"]["dependencies"]}
    assert core == {"torch", "numpy", "einops", "msgpack"}


def test_extras_refer_to_extras_that_exist() -> None:
    lines = [Requirement(line) for lines in EXTRAS.values() for line in lines]
    assert {name for line in lines if line.name == "pfx" for name in line.extras} <= set(EXTRAS)
