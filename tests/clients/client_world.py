"""The clients' venvs and servers, and models that are taught what a chat template has them say."""

from __future__ import annotations

import os
import random
import signal
import string
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from ports import free_port
from tiny_models import random_qwen3, two_role_tokenizer

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin"
AGENTS_OF_NPM = ROOT / ".venv-clients" / "agents" / "node_modules" / ".bin"
AIDER = ROOT / ".venv-clients" / "aider" / "bin"
MLFLOW = ROOT / ".venv-clients" / "mlflow" / "bin"
OPENENV = ROOT / ".venv-clients" / "openenv" / "bin"
KEY = "a-key-of-the-tests"
PROXY_KEY = "sk-a-key-of-the-proxy"
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ '<bot>' if m.role == 'assistant' else '<user>' }}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments }}}</tool_call>{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


@contextmanager
def running(command: list[str], health: str, directory: Path, **environment: str) -> Iterator[str]:
    """Run a server of another package on a free port; yield its address once it answers the path `health`."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", directory / "log"
    known = {"HOME": str(directory), "PATH": os.environ["PATH"], **environment}
    with log.open("w") as output:
        # its workers are processes of their own
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=directory,
            env=known,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    until = time.monotonic() + 120
    try:
        while not _answers(url + health):
            assert server.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < until, log.read_text()[-6000:]
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except OSError:
        return False


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


def taught_model(
    directory: Path,
    template: str = TEMPLATE,
    make_pairs: Callable[[random.Random], list[tuple[str, str]]] = examples,
    steps: int = 250,
) -> Path:
    """Write a tiny model that was taught pairs of what it reads, in the terms of its chat template, and answers.

    As it is: it calls the tool it is offered, reads the result, and answers all else with 4.
    """
    torch.set_num_threads(1)
    tokenizer = two_role_tokenizer(template)
    model = random_qwen3(tokenizer, max_position_embeddings=512, initializer_range=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rng = random.Random(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        pairs = [tuple(map(tokenizer.encode, pair)) for _ in range(4) for pair in make_pairs(rng)]
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
