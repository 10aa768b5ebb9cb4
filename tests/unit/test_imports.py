"""Who may import what: the rules that the layer contract in pyproject.toml cannot express."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "pfx").rglob("*.py"))

# Top-level modules of everything that is an extra in pyproject.toml.
OPTIONAL = {
    *("IPython", "PIL", "hypothesis", "ipykernel", "jax", "jaxlib", "jinja2", "matplotlib"),
    *(
        "nbclient",
        "nbformat",
        "pytest",
        "rich",
        "safetensors",
        "tokenizers",
        "transformers",
        "tyro",
    ),
}
# file pattern -> the private or process-bound parts of torch that it may name
MAY_NAME = {
    "pfx/_torch.py": ("torch", "functorch"),
    "pfx/tree.py": ("torch.utils._pytree",),
    "pfx/runtime/process*.py": ("torch.distributed",),
}


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for each import and each attribute chain, aliases resolved."""
    module = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                if alias.asname:
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            at: ast.expr = node
            while isinstance(at, ast.Attribute):
                parts.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name):
                yield node.lineno, ".".join([aliases.get(at.id, at.id), *reversed(parts)])


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_private(name: str) -> bool:
    """Whether a dotted name is a part of torch that may change in any release."""
    if within(name, "torch.ops") or within(name, "torch.library"):
        return False  # operators are called by name, and an underscore there is no promise broken
    if within(name, "functorch") or within(name, "torch.fx.experimental"):
        return True
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and p[:2] != "__" for p in parts)


def may_name(path: str, name: str) -> bool:
    return any(
        fnmatch(path, pattern) and within(name, part)
        for pattern, parts in MAY_NAME.items()
        for part in parts
    )


def breaches(path: str, source: str) -> list[str]:
    """The lines of one file that name what only another file may name."""
    return [
        f"{path}:{line}: {name}"
        for line, name in sorted(set(names_in(source)))
        if (is_private(name) or within(name, "torch.distributed") or within(name, "models"))
        and not may_name(path, name)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_its_own_file_names_a_private_part(path: Path) -> None:
    """Private torch in `_torch`, pytrees in `tree`, processes in `runtime/process`, no models."""
    assert breaches(path.relative_to(ROOT).as_posix(), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pfx/spec.py", "import torch._C"),
        ("pfx/spec.py", "from torch._functorch import eager_transforms"),
        ("pfx/spec.py", "from torch import _C"),
        ("pfx/spec.py", "import torch\ntorch._C.get()"),
        ("pfx/spec.py", "import torch as t\nt.fx.experimental.proxy_tensor"),
        ("pfx/spec.py", "from torch import fx\nfx.experimental.proxy_tensor.make_fx"),
        ("pfx/spec.py", "import functorch"),
        ("pfx/spec.py", "from torch.utils import _pytree"),
        ("pfx/tree.py", "import torch._C"),
        ("pfx/runtime/simulated.py", "import torch.distributed as dist"),
        ("pfx/mesh.py", "import torch\ntorch.distributed.is_initialized()"),
        ("pfx/api.py", "def f():\n    from models import gpt"),
    ],
)
def test_a_breach_is_found(path: str, source: str) -> None:
    assert breaches(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pfx/_torch.py", "from torch._C import _functorch"),
        ("pfx/tree.py", "import torch.utils._pytree as tree"),
        ("pfx/runtime/process.py", "import torch.distributed as dist\ndist.all_reduce"),
        ("pfx/runtime/process_group.py", "from torch import distributed"),
        ("pfx/lax/scan.py", "import torch\ntorch.ops.aten._foreach_add\ntorch.__version__"),
        ("pfx/lax/scan.py", "from pfx import _torch\n_torch.trace"),
    ],
)
def test_what_is_allowed_is_no_breach(path: str, source: str) -> None:
    assert breaches(path, source) == []


def test_import_pfx_loads_no_optional_package() -> None:
    """What torch itself loads is torch's business; what `import pfx` adds is ours."""
    code = (
        "import sys, torch, numpy; before = set(sys.modules)\n"
        "import pfx, pfx.data\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    added = set(done.stdout.split())
    assert "pfx" in added
    assert not added & OPTIONAL
