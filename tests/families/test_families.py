"""Each model family keeps what docs/reference/models.md says of it; one that does not fails by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_world  # noqa: F401 - sets torch's threads before it is imported
from checks import measure
from families import FAMILIES, Family
from page import PAGE, TABLE, render

EXPECTED = json.loads(TABLE.read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_keeps_its_row_of_the_table(family: Family, tmp_path: Path) -> None:
    row, reasons = measure(family, tmp_path)
    # tests/vllm asks for the column of vLLM
    row["vllm"] = EXPECTED[family.name]["vllm"]
    assert row == EXPECTED[family.name], "; ".join(f"{family.name}: {error!r}" for error in reasons)


def test_the_page_is_that_of_the_table_and_names_every_family() -> None:
    assert list(EXPECTED) == [family.name for family in FAMILIES]
    assert PAGE.read_text() == render(EXPECTED), "write it again: python tests/families/page.py"
