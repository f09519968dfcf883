"""The arguments that vLLM is started with, and the faults that stop a start; without vLLM."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verifiers_vllm import alias, cli
from verifiers_vllm.command import environment_for, is_cpu_build, vllm_arguments
from verifiers_vllm.versions import NEWEST, OLDEST, StartError, installed_version, known_minor


def arguments(*given: str, minor: Any = NEWEST, on_cpu: bool = False) -> list[str]:
    return vllm_arguments("m", "127.0.0.1", 8000, given, minor, on_cpu=on_cpu)


def test_what_training_needs_is_filled_in() -> None:
    assert arguments()[:5] == ["m", "--host", "127.0.0.1", "--port", "8000"]
    text = " ".join(arguments())
    for flag in ("--logprobs-mode processed_logprobs", "--generation-config vllm", "--enable-scale-out"):
        assert flag in text
    assert "--enforce-eager" not in text
    assert {"--enforce-eager", "--no-enable-chunked-prefill", "--no-async-scheduling"} <= set(arguments(on_cpu=True))
    assert "--no-enable-chunked-prefill" not in arguments("--enable-chunked-prefill", on_cpu=True)


@pytest.mark.parametrize(
    "given", [["--logprobs-mode", "raw_logprobs"], ["--logprobs-mode=raw_logprobs"], ["--logprobs_mode=raw_logprobs"]]
)
def test_a_flag_that_is_given_wins_in_each_way_of_writing_it(given: list[str]) -> None:
    built = arguments(*given)
    assert "processed_logprobs" not in built
    assert built[5 : 5 + len(given)] == given


def test_other_flags_go_through_unchanged_and_in_order() -> None:
    given = ["--tensor-parallel-size", "2", "--hf-overrides", '{"a": [1, 2]}', "-O3", "--no-enforce-eager"]
    built = arguments(*given, on_cpu=True)
    assert built[5 : 5 + len(given)] == given
    assert "--enforce-eager" not in built


def test_an_older_minor_is_not_given_a_flag_it_does_not_know() -> None:
    assert "--enable-scale-out" not in arguments(minor=OLDEST)


def test_the_weight_routes_are_always_on_and_adapters_where_asked_for() -> None:
    plain = environment_for([], {"VLLM_SERVER_DEV_MODE": "0", "KMP_BLOCKTIME": "5"}, on_cpu=False, threads=3)
    assert plain["VLLM_SERVER_DEV_MODE"] == "1"
    assert plain["KMP_BLOCKTIME"] == "5"
    assert plain["OMP_NUM_THREADS"] == "3"
    assert plain["VLLM_NO_USAGE_STATS"] == "1"
    assert plain["VLLM_ENFORCE_STRICT_TOOL_CALLING"] == "0"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in plain
    assert "VLLM_CPU_KVCACHE_SPACE" not in plain
    with_adapters = environment_for(["--enable-lora"], {}, on_cpu=True)
    assert with_adapters["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert with_adapters["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert with_adapters["MALLOC_MMAP_MAX_"] == "0"
    assert not {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} & plain.keys()
    assert is_cpu_build("0.32.0+cpu")


@pytest.mark.parametrize("version", ["0.27.1", "0.9.2", "nightly"])
def test_an_unsupported_version_gets_a_sentence(version: str) -> None:
    with pytest.raises(StartError, match=r"0\.28 to 0\.\d+"):
        known_minor(version)


@pytest.mark.parametrize("minor", [OLDEST, NEWEST])
def test_each_known_minor_is_started_without_a_word(minor: tuple[int, int]) -> None:
    assert known_minor(f"{minor[0]}.{minor[1]}.1+cpu") == (minor, None)


def test_a_newer_version_is_started_with_a_sentence() -> None:
    found, warning = known_minor(f"{NEWEST[0]}.{NEWEST[1] + 1}.0")
    assert found == NEWEST
    assert warning is not None
    assert "newer than" in warning


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that leaves a version of vllm-cpu where Python finds packages: its metadata alone."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(version: str) -> None:
        for old in tmp_path.glob("vllm_cpu-*"):
            shutil.rmtree(old)
        folder = tmp_path / f"vllm_cpu-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")

    return write


def test_a_missing_vllm_and_a_nameless_cpu_build_are_told_apart(install: Callable[[str], None]) -> None:
    with pytest.raises(StartError, match=r"not installed.*install\.sh"):
        installed_version()
    install("0.32.0")
    with pytest.raises(StartError, match=r"python -m verifiers_vllm\.alias"):
        installed_version()


def test_the_cpu_build_gets_its_name_once(install: Callable[[str], None], tmp_path: Path) -> None:
    assert alias.main() == 1
    install("0.31.0")
    assert alias.main() == 0
    assert installed_version() == "0.31.0+cpu"
    assert alias.write_alias() is None
    # an upgrade of the build takes its name along
    install("0.32.0")
    alias.write_alias()
    assert [path.name for path in tmp_path.glob("vllm-*")] == ["vllm-0.32.0+cpu.dist-info"]


@pytest.fixture
def newest_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "installed_version", lambda: "0.32.0+cpu")


def test_a_wrong_start_ends_with_a_sentence_and_a_code(
    newest_installed: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert cli.main(["--model", "/nowhere/at/all"]) == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert "is not a directory" in capsys.readouterr().err
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert cli.main(["--model", str(tmp_path), "--api-key-var", "NO_SUCH_KEY"]) == 2
    assert "NO_SUCH_KEY" in capsys.readouterr().err
    monkeypatch.setattr(cli, "_PORT_WAIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--model", str(tmp_path), "--port", str(port)]) == 1
    assert f"cannot bind 127.0.0.1:{port}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["--port", "0"])
    assert ended.value.code == 2


def test_a_port_that_a_killed_server_lets_go_of_a_moment_later_is_waited_for() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    letting_go = threading.Timer(0.3, taken.close)
    letting_go.start()
    held = cli._hold_port("127.0.0.1", port)
    assert held.getsockname()[1] == port
    held.close()
    letting_go.join()


def test_the_page_on_commands_names_its_own_options_and_their_defaults() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/commands.md").read_text()
    part = page.split("## vf-vllm")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("| `--")]
    told = {cells[0].strip(" `"): cells[2].strip(" |") for cells in rows}
    own = {a.option_strings[-1]: a for a in cli.parser()._actions if a.dest not in ("help", "version", "model")}
    assert told.keys() == own.keys()
    for flag, default in told.items():
        if own[flag].default is not None:
            assert default == str(own[flag].default), flag
