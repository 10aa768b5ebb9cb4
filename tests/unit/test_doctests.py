"""Every example in a docstring of pfx runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import pfx

MODULES = [
    "pfx",
    *sorted(
        module.name
        for module in pkgutil.walk_packages(pfx.__path__, "pfx.")
        if not module.name.endswith("__main__")  # importing one runs it
    ),
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str) -> None:
    module = importlib.import_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for case in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(case, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_there_are_examples() -> None:
    modules = [importlib.import_module(name) for name in MODULES]
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert any(case.examples for module in modules for case in finder.find(module))
