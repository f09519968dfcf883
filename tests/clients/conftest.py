"""A server process with a model that was taught three answers, and other people's clients in a venv of their own."""

from __future__ import annotations

import os
import random
import shutil
import socket
import string
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tiny_models import random_qwen3, two_role_tokenizer

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin"
KEY = "a-key-of-the-tests"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ '<bot>' if m.role == 'assistant' else '<user>' }}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments }}}</tool_call>{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def examples(rng: random.Random) -> list[tuple[str, str]]:
    """Return a conversation, one that offers a tool, and one in which the tool has answered: each with its answer."""

    def said() -> str:
        return "".join(rng.choices(string.ascii_letters + string.digits + " ?.", k=rng.randint(1, 60)))

    asked = f"<tools>add</tools><user>{said()}<bot>"
    return [
        (f"<user>{said()}<bot>", "It is 4.<eos>"),
        (asked, f"{CALL}<eos>"),
        (f"{asked}{CALL}<eos><user>{said()[:8]}<bot>", "The sum is 3.<eos>"),
    ]


def taught_model(directory: Path, steps: int = 250) -> Path:
    """Write a tiny model that calls the tool it is offered, reads the result, and answers all else with 4."""
    torch.set_num_threads(1)
    tokenizer = two_role_tokenizer(TEMPLATE)
    model = random_qwen3(tokenizer, max_position_embeddings=512, initializer_range=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rng = random.Random(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        pairs = [tuple(map(tokenizer.encode, pair)) for _ in range(4) for pair in examples(rng)]
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.zeros(len(pairs), width, dtype=torch.long)
        labels = torch.full((len(pairs), width), -100)
        for row, (prompt, answer) in enumerate(pairs):
            whole = torch.tensor(prompt + answer)
            ids[row, : len(whole)] = whole
            labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the base URL, without /v1, of a `vf-serve` that asks for KEY and calls its model "taught"."""
    directory = taught_model(tmp_path_factory.mktemp("clients") / "model")
    command = [sys.executable, "-m", "verifiers_embedded", "--model", str(directory), "--port", "0", "--seed", "0"]
    command += ["--threads", "1", "--served-model-name", "taught", "--api-key-var", "VF_TEST_KEY"]
    process = subprocess.Popen(
        [*command, "--parent-pid", str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VF_TEST_KEY": KEY},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "listening on " in line, line
    yield line.rpartition("listening on ")[2].strip()
    process.terminate()
    process.communicate(timeout=10)


Run = Callable[..., str]


@pytest.fixture
def run(server: str, tmp_path: Path) -> Run:
    """Run a program of the clients' venv, in an empty folder; its output. Skips where there is no such venv."""
    if not (CLIENTS / "python").exists():
        pytest.skip("the clients are not installed; run: make test-clients")

    def begin(*command: str, timeout_s: float = 100.0, **environment: str) -> str:
        known = {
            "HOME": str(tmp_path),
            "PATH": os.environ["PATH"],
            "VF_BASE": server,
            "OPENAI_BASE_URL": f"{server}/v1",
            "OPENAI_API_KEY": KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            **environment,
        }
        done = subprocess.run(
            [str(CLIENTS / command[0]), *command[1:]],
            cwd=tmp_path,
            env=known,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    return begin


PROXY = """
model_list:
  - model_name: taught
    litellm_params: {model: openai/taught, api_base: SERVER/v1, api_key: os.environ/VF_TEST_KEY}
general_settings: {master_key: os.environ/VF_PROXY_KEY}
litellm_settings: {telemetry: false, num_retries: 0}
router_settings: {num_retries: 0}
"""


@pytest.fixture(scope="session")
def proxy(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the base URL, without /v1, of litellm's proxy in front of the server; it has a key of its own."""
    if not (CLIENTS / "litellm").exists():
        pytest.skip("the clients are not installed; run: make test-clients")
    directory = tmp_path_factory.mktemp("proxy")
    (directory / "config.yaml").write_text(PROXY.replace("SERVER", server))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "HOME": str(directory),
        "PATH": os.environ["PATH"],
        "VF_TEST_KEY": KEY,
        "VF_PROXY_KEY": "sk-a-key-of-the-proxy",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
    }
    command = [str(CLIENTS / "litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--num_workers", "1"], cwd=directory, env=environment, stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 60
    try:
        while not _answers(f"{url}/health/liveliness"):
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < until, log.read_text()[-6000:]
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture
def scripts() -> Path:
    return Path(__file__).parent / "scripts"


@pytest.fixture
def curl() -> str:
    found = shutil.which("curl")
    if found is None:
        pytest.skip("there is no curl on this machine")
    return found
