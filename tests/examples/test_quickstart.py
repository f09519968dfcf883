"""The notebook of the first hour runs as it stands, and its model learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def shown_html(notebook: Any) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_notebook_runs_and_its_model_learns(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    environment, results = shown_html(notebook)
    assert "SingleTurnEnv" in environment
    assert "20 rollouts" in results
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", printed(notebook)).groups())  # type: ignore[union-attr]
    assert after > before + 0.5
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()
