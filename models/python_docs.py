"""Write the documentation of the Python standard library as JSONL, a text to learn from.

    python models/python_docs.py data/docs.jsonl

A record for each topic of ``help()`` and for each module, class and function with a docstring, in a
fixed order. Nothing is imported: the sources are read.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

LEFT_OUT = ("test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__")
SHORTEST = 40  # characters


def documents() -> Iterator[str]:
    """Each text, in the order of names."""
    yield from (topics[name] for name in sorted(topics))
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if not set(path.relative_to(folder).parts) & set(LEFT_OUT):
            yield from docstrings(path)


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a source file, each under the name of what it describes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(parsed):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= SHORTEST:
                yield f"{getattr(node, 'name', path.stem)}\n\n{text}\n"


def write(path: Path, most: int | None = None) -> int:
    """Write the records, `most` of them at most; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w") as file:
        for text in documents():
            if count == most:
                break
            file.write(json.dumps({"text": text}) + "\n")
            count += 1
    return count


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "data/docs.jsonl")
    print(f"{target}: {write(target):,} documents")
