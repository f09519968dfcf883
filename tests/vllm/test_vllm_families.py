"""Each model family agrees with a real vLLM as docs/reference/models.md says; one that does not fails by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import FAMILIES, Family
from on_vllm import cell_of, sample_all
from page import TABLE

EXPECTED = json.loads(TABLE.read_text())


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_all(tmp_path_factory.mktemp("families"))


# the first of them waits for all to be sampled
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_vllm_samples_what_the_trainer_computes(family: Family, sampled: Path) -> None:
    cell, reason = cell_of(family, sampled)
    assert cell == EXPECTED[family.name]["vllm"], f"{family.name}: {reason}"
