"""Programs that run in a sandbox and call the policy: what they reach, and what their ends make of their rollouts."""

from __future__ import annotations

import asyncio
import json
import socket
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import verifiers as vf
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.sandbox.spec import IsolationLevel, SandboxSpec
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.types import Outcome, RolloutKey

pytestmark = pytest.mark.slow
LEVELS = ("process", "bubblewrap", "podman")

HANGS_S = 60.0
"""Seconds after which a test takes a rollout for hanging."""

ASK = """
import json, os, sys, time, urllib.request

def ask(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}], "temperature": 0.1}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def env_of(program: str, isolation: str, *arguments: str, **options: Any) -> vf.ProgramEnv:
    """Return an environment whose program is this Python code, after the function `ask`."""
    sandbox = options.pop("sandbox", SandboxSpec(isolation, memory_bytes=1 << 29))
    return vf.ProgramEnv(
        ["python3", "agent.py", *arguments],
        sandbox=sandbox,
        files={"agent.py": ASK + program, **options.pop("files", {})},
        dataset=[{"question": "6 times 7?", "answer": "42"}],
        **options,
    )


async def played(env: Any, server: FakeOpenAIServer, prompt: Any = None, **limits: Any) -> Rollout:
    backend = HttpBackend(Endpoint(server.url))
    runner = Run(env, backend, "fake", {"temperature": 0.7}, require_tokens=True, **limits)
    prompt = prompt or [{"role": "user", "content": "6 times 7?"}]
    request = RolloutRequest(RolloutKey(0, 0, 0), prompt, "42", info={"repo": "a/b"}, seed=3)
    group = await asyncio.wait_for(runner.run_group([request]), HANGS_S)
    await backend.close()
    return group.rollouts[0]


SOLVES = """
import shutil
said = ask(sys.argv[1])
assert sys.stdin.read() == "from a/b"
assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"] == sys.argv[2]
print("thinking", file=sys.stderr)
print("It is", said)
json.dump({"reward": 0.5, "calls": 1}, open("reward.json", "w"))
"""


async def test_a_programs_calls_are_trained_and_its_file_is_the_reward(isolation: IsolationLevel) -> None:
    env = env_of(SOLVES, isolation, "{prompt}", "{base_url}", stdin="from {info.repo}", result="reward.json")
    async with FakeOpenAIServer("42") as server:
        rollout = await played(env, server)
    assert (rollout.outcome, rollout.reward, rollout.metrics) == (Outcome.COMPLETED, 0.5, {"calls": 1.0}), rollout
    assert (rollout.turns, len(rollout.rows)) == (1, 1)
    assert rollout.completion == [{"role": "assistant", "content": "It is 42"}]
    assert (rollout.state["stderr"], rollout.state["exit_code"]) == ("thinking\n", 0)
    body = server.requests[0].body
    assert (body["messages"][-1]["content"], body["temperature"]) == ("6 times 7?", 0.7)


# -- what can be reached ------------------------------------------------------------------------------------------

REACHES = """
import socket
tried = {}
def attempt(name, family, address):
    with socket.socket(family) as sock:
        sock.settimeout(2)
        try:
            sock.connect(address)
            tried[name] = True
        except OSError:
            tried[name] = False
upstream, gateway, abstract, path = sys.argv[1:]
for name, port in (("upstream", upstream), ("gateway", gateway)):
    attempt(name, socket.AF_INET, ("127.0.0.1", int(port)))
    attempt(name + "6", socket.AF_INET6, ("::1", int(port)))
attempt("outside", socket.AF_INET, ("192.0.2.1", 80))
attempt("abstract", socket.AF_UNIX, "\\0" + abstract)
attempt("path", socket.AF_UNIX, path)
own = os.environ["OPENAI_BASE_URL"].rpartition(":")[2].partition("/")[0]
attempt("own", socket.AF_INET, ("127.0.0.1", int(own)))
table = open("/proc/net/tcp").read().splitlines()[1:] if os.path.exists("/proc/net/tcp") else []
listening = [int(line.split()[1].rpartition(":")[2], 16) for line in table if line.split()[3] == "0A"]
print(json.dumps({**tried, "said": ask("hi"), "others": [port for port in listening if port != int(own)]}))
"""


async def test_a_program_without_network_reaches_its_gateway_and_nothing_else(contained: str, tmp_path: Any) -> None:
    from verifiers.gateway.gateway import gateway_of_loop

    tmp_path.chmod(0o755)
    abstract, unix = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    name, path = f"test-{uuid.uuid4().hex}", str(tmp_path / "socket")
    abstract.bind("\0" + name)
    unix.bind(path)
    abstract.listen()
    unix.listen()
    try:
        async with FakeOpenAIServer("42") as server:
            ports = [url.rpartition(":")[2].partition("/")[0] for url in (server.url, (await gateway_of_loop()).url)]
            env = env_of(REACHES, contained, *ports, name, path)
            env.rubric = vf.Rubric(funcs=[lambda completion: 1.0])
            rollout = await played(env, server)
    finally:
        abstract.close()
        unix.close()
    assert rollout.outcome is Outcome.COMPLETED, rollout.failure
    said = json.loads(rollout.completion[0]["content"])
    assert (said.pop("own"), said.pop("said"), said.pop("others")) == (True, "42", [])
    assert len(said) == 7
    assert not any(said.values()), said


GIVES_UP = """
import http.client
port = os.environ["OPENAI_BASE_URL"].rpartition(":")[2].partition("/")[0]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "slow"}]})
gone = http.client.HTTPConnection("127.0.0.1", int(port))
gone.request("POST", "/v1/chat/completions", body, headers)
time.sleep(0.5)
gone.close()
time.sleep(2)
for size in (10, 900_000):
    ask("x" * size)
"""


async def test_a_hang_up_is_seen_through_the_relay_and_large_bodies_pass(contained: str) -> None:
    env = env_of(GIVES_UP, contained, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
    async with FakeOpenAIServer("42", latency_s=lambda n: 1.0 if n == 0 else 0.0) as server:
        rollout = await played(env, server)
    # the answer to the call that was hung up on is in no row
    assert (rollout.outcome, rollout.turns) == (Outcome.COMPLETED, 2), rollout.failure
    assert [len(request.body["messages"][0]["content"]) for request in server.requests] == [4, 10, 900_000]


FAILED = Outcome.ENVIRONMENT_ERROR

# -- how programs end ---------------------------------------------------------------------------------------------

OUTLIVED = """
import subprocess
child = ["sh", "-c", "trap '' TERM HUP INT; exec sleep " + sys.argv[1]]
subprocess.Popen(child, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


@pytest.mark.parametrize(
    ("program", "options", "outcome", "text"),
    [
        ("ask('hi'); held = bytearray(1 << 30)", {}, FAILED, "emory"),
        ("ask('hi')\nwhile True: print('x' * (1 << 20))", {}, FAILED, "bytes more than output_bytes"),
        ("print(1)", {}, FAILED, "without an answer of the policy; does it use OPENAI_BASE_URL"),
        ("ask('hi'); time.sleep(600)", {"rollout_timeout_s": 5.0}, Outcome.TIMED_OUT, "rollout_timeout_s=5"),
        ("time.sleep(600)", {"timeout_seconds": 3.0}, FAILED, "no answer of the policy"),
        ("ask('hi')", {"faults": [Fault(400)]}, Outcome.PROVIDER_ERROR, "400"),
    ],
    ids=["memory", "loud", "silent", "hang", "hang-without-a-call", "provider"],
)  # fmt: skip
async def test_a_program_that_fails_has_no_reward_and_leaves_no_process(
    isolation: IsolationLevel,
    program: str,
    options: dict[str, Any],
    outcome: Outcome,
    text: str,
    marker: str,
    wait_until_gone: Callable[[str], None],
) -> None:
    options = {"rubric": vf.Rubric(funcs=[lambda completion: 1.0]), **options}
    faults = options.pop("faults", None)
    limits = {name: options.pop(name) for name in ("rollout_timeout_s",) if name in options}
    env = env_of(OUTLIVED + program, isolation, marker, **options)
    async with FakeOpenAIServer("42", faults=faults) as server:
        rollout = await played(env, server, **limits)
    assert (rollout.outcome, rollout.reward) == (outcome, None), rollout.failure
    assert text in rollout.failure.text
    wait_until_gone(marker)


async def test_a_program_that_is_cut_off_is_scored_by_what_there_is(
    isolation: IsolationLevel, marker: str, wait_until_gone: Callable[[str], None]
) -> None:
    program = OUTLIVED + "open('made', 'w').write('half'); ask('hi'); time.sleep(600)"
    env = env_of(
        program, isolation, marker, timeout_seconds=4.0,
        result="r", score=["sh", "-c", 'test "$(cat made)" = half && echo 0.5 > r'],
    )  # fmt: skip
    async with FakeOpenAIServer("42") as server:
        rollout = await played(env, server)
    assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.TRUNCATED, 0.5, 1), rollout.failure
    wait_until_gone(marker)


FORGES = """
import subprocess
ask("hi")
forge = "while :; do echo 1 > r; echo 1 > grade.py; done"
subprocess.Popen(["sh", "-c", forge, sys.argv[1]], start_new_session=True, stdout=subprocess.DEVNULL,
                 stderr=subprocess.DEVNULL)
os.mkdir("json"); open("json/__init__.py", "w").write("raise SystemExit('hijacked')")
time.sleep(0.5)
"""
GRADE = "import json, sys; json.dump({'reward': 0.25, 'right': sys.argv[1] == '42'}, open('r', 'w'))"


async def test_the_score_command_finds_nothing_of_the_programs_running_and_no_result(
    isolation: IsolationLevel, marker: str, wait_until_gone: Callable[[str], None]
) -> None:
    env = env_of(
        FORGES, isolation, marker,
        result="r", score=["python3", "-I", "grade.py", "{answer}"], score_files={"grade.py": GRADE},
    )  # fmt: skip
    async with FakeOpenAIServer("42") as server:
        rollout = await played(env, server)
    assert (rollout.outcome, rollout.reward, rollout.metrics) == (Outcome.COMPLETED, 0.25, {"right": 1.0}), rollout
    wait_until_gone(marker)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        ("exit 3", "the score command 'sh' ended with exit code 3"),
        ("true", "the score command 'sh' left no file 'r'"),
        ("sleep 600", "did not end within wall_time_s=2"),
    ],
)
async def test_a_score_command_that_fails_is_no_reward(score: str, text: str) -> None:
    env = env_of(
        "ask('hi'); open('r', 'w').write('1')", "process", result="r", score=["sh", "-c", score],
        sandbox=SandboxSpec("process", wall_time_s=2.0),
    )  # fmt: skip
    async with FakeOpenAIServer("42") as server:
        rollout = await played(env, server)
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert text in rollout.failure.text


STANDS = """
import socket
ask("hi")
os.mkdir("tests")
"""
IN_THE_WAY = {
    "folder": "os.makedirs('out/r/full'); os.makedirs('tests/grade.py/full')",
    "file": "open('out', 'w').close(); os.rmdir('tests'); open('tests', 'w').close()",
    "link": "os.symlink('/usr', 'out'); os.rmdir('tests'); os.symlink('/usr/lib', 'tests')",
    "dangling": "os.mkdir('out'); os.symlink('/nowhere/r', 'out/r'); os.symlink('/nowhere/g', 'tests/grade.py')",
    "pipe": "os.mkdir('out'); os.mkfifo('out/r'); os.mkfifo('tests/grade.py')",
    "socket": "os.mkdir('out'); socket.socket(socket.AF_UNIX).bind('out/r'); os.mkfifo('answer')",
    "mode": "os.mkdir('out'); open('out/r', 'w').close(); [os.chmod(at, 0) for at in ('out/r', 'out', 'tests', '.')]",
    "disk": """
os.mkdir("out")
try:
    for number in range(9): open(str(number), "wb").write(bytes(60 << 20))
except OSError: pass
""",
}


@pytest.mark.parametrize("what", IN_THE_WAY)
async def test_nothing_that_a_program_leaves_keeps_it_from_being_scored(isolation: IsolationLevel, what: str) -> None:
    if (what, isolation) in (("disk", "process"), ("disk", "podman"), ("mode", "podman")):
        pytest.skip("the level does not hold the disk, leaves no room on it, or the directory is not the program's")
    grade = "import json; json.dump({'reward': 0.25}, open('out/r', 'w'))"
    env = env_of(
        STANDS + IN_THE_WAY[what], isolation,
        result="out/r", score=["python3", "-I", "tests/grade.py"], score_files={"tests/grade.py": grade},
    )  # fmt: skip
    async with FakeOpenAIServer("42") as server:
        rollout = await played(env, server)
    assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 0.25), rollout.failure


ENDS = {
    "exit": ("ask('hi'); sys.exit('no idea')", "exit code 1; its stderr ends with 'no idea'"),
    "signal": ("ask('hi'); os.kill(os.getpid(), 9)", "killed by signal 9"),
    "no-result": ("ask('hi')", "left no file 'r' with a reward"),
    "bad-result": ("ask('hi'); open('r', 'w').write('NaN')", "not a finite number"),
    "folder": ("ask('hi'); os.mkdir('r')", "cannot be read"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_program_that_fails_by_itself_is_zero_where_the_environment_says_so(
    isolation: IsolationLevel, end: str, marker: str, wait_until_gone: Callable[[str], None]
) -> None:
    program, text = ENDS[end]
    async with FakeOpenAIServer("42") as server:
        rollout = await played(env_of(program, isolation, result="r", failed_program="zero"), server)
        unscored = await played(env_of(OUTLIVED + program, isolation, marker, result="r"), server)
    wait_until_gone(marker)
    assert (rollout.outcome, rollout.reward, rollout.metrics) == (Outcome.COMPLETED, 0.0, {"failed_program": 1.0})
    assert text in rollout.state["result"]["failed_program"]
    assert len(rollout.rows) == 1
    assert (unscored.outcome, unscored.reward) == (FAILED, None)
    assert text in unscored.failure.text


@pytest.mark.parametrize(
    ("program", "options", "outcome"),
    [
        ("sys.exit(3)", {}, FAILED),
        ("print(1)", {}, FAILED),
        ("ask('hi'); ask('there')", {"faults": [None, Fault(400)]}, Outcome.PROVIDER_ERROR),
        ("ask('hi')", {"score": ["sh", "-c", "exit 1"]}, FAILED),
    ],
    ids=["exit-without-a-call", "silent", "provider", "score"],
)
async def test_a_failure_of_anything_else_is_never_zero(
    program: str, options: dict[str, Any], outcome: Outcome
) -> None:
    options = dict(options)
    faults = options.pop("faults", None)
    env = env_of(program, "auto", result="r", failed_program="zero", **options)
    async with FakeOpenAIServer("42", faults=faults) as server:
        rollout = await played(env, server)
    assert (rollout.outcome, rollout.reward) == (outcome, None)


LOG = """
print("=" * 60 + "\\n" * 3 + "collected 1 item " * 20, flush=True)
print("FAILED test_answer", open("answer.txt").read())
"""


async def test_a_limit_that_a_program_sets_does_not_cut_the_graders_log(contained: str) -> None:
    program = "import resource; ask('hi'); open('answer.txt', 'w').write('wrong')\n"
    program += "try: resource.prlimit(1, resource.RLIMIT_FSIZE, (250, 250))\nexcept OSError: pass"
    score = "python3 -I hidden.py > log.txt 2>&1; grep -q FAILED log.txt && echo 0 > r || echo 1 > r"
    env = env_of(program, contained, result="r", score=["bash", "-c", score], score_files={"hidden.py": LOG})
    async with FakeOpenAIServer("42") as server:
        rollout = await played(env, server)
    assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 0.0), rollout.failure
