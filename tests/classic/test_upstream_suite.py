"""The test suite that classic verifiers 0.1.5 shipped with, run against this package.

pip fetches the source distribution from the package index; where that cannot be reached the test skips.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
PASSED = 167
KNOWN_FAILURES = {
    # the exact text of a warning, by a mock
    "test_environment.py::TestEnvironmentBase::test_different_parser_rubric_parser_warns",
    # they replace `verifiers.scripts.eval.vf`, a module's inner name
    "test_eval_cli.py::test_cli_sampling_args_precedence_over_flags",
    "test_eval_cli.py::test_cli_sampling_args_fill_from_flags_when_missing",
    # a parameter without a type is strict there, which OpenAI's API refuses
    "test_tool_utils.py::TestToolUtils::test_convert_func_to_oai_tool_without_type_hint",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Return a folder with the suite, and none of the classic package beside it."""
    command = [sys.executable, "-m", "pip", "download", "verifiers==0.1.5", "--no-deps", "--no-binary", "verifiers"]
    done = subprocess.run([*command, "--quiet", "--dest", str(tmp_path)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    with tarfile.open(tmp_path / "verifiers-0.1.5.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return (tmp_path / "verifiers-0.1.5" / "tests").rename(tmp_path / "tests")


def test_all_but_four_tests_of_classic_verifiers_pass(suite: Path) -> None:
    options = ["-q", "-rf", "--tb=no", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir", str(suite)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(suite)],
        cwd=suite.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    failed = set(re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, flags=re.MULTILINE))
    assert failed == KNOWN_FAILURES, done.stdout + done.stderr
    assert f"{len(KNOWN_FAILURES)} failed, {PASSED} passed" in done.stdout
