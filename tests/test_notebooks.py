"""Every notebook runs from top to bottom, and what is committed shows that it did."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in a copy, so that a notebook which writes files leaves the checkout as it was."""
    shutil.copytree(path.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(tmp_path / path.name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()  # raises CellExecutionError, with the cell and its traceback


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    again = f"run `make notebooks` and commit {path.name}"
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), again
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds, again
    assert "error" not in kinds
