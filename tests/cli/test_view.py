"""`vf-view`: what its routes give, what they refuse, and how the command ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from verifiers.cli.stored_runs import view
from verifiers.reports.server import RunServer, find_runs


def row(example: int, generation: int, reward: float | None = 1.0) -> dict[str, Any]:
    return {
        "example_id": example,
        "generation": generation,
        "prompt": [{"role": "user", "content": f"question {example}"}],
        "completion": [{"role": "assistant", "content": f"answer {example}.{generation}"}],
        "outcome": "completed" if reward is not None else "provider_error",
        "reward": reward,
        "completion_tokens": 3,
    }


def store(directory: Path, rows: list[dict[str, Any]], **metadata: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (directory / "metadata.json").write_text(json.dumps({"env": "sums", "model": "m", **metadata}))
    return directory


def everything_under(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


class Visitor:
    def __init__(self, server: RunServer, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        # an address is sent as it is: clients take dots out of it, but others need not
        url = aiohttp.client.URL(self.server.url.rstrip("/") + path, encoded=True)
        async with self.session.request(method, url, headers=headers) as answer:
            assert answer.headers.get("Access-Control-Allow-Origin") is None
            return answer.status, await answer.text()

    async def json(self, path: str) -> Any:
        status, text = await self.get(path)
        assert status == 200, text
        return json.loads(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "evals"
    reward = {"mean": 0.75, "stderr": 0.0312, "low": 0.6888, "high": 0.8112}
    known = {
        "summary": {"rewards": {"reward": reward}, "rollouts": 4, "seconds": 1.0},
        "env_args": {"n": 3, "s": "<b>"},
    }
    store(folder / "sums--m" / "old1", [row(e, g) for e in range(2) for g in range(2)], **known)
    store(folder / "sums--m" / "new2", [row(0, 0, 0.0)], num_examples=2, rollouts_per_example=2)
    os.utime(folder / "sums--m" / "old1" / "results.jsonl", (1, 1))
    (tmp_path / "secret.txt").write_text("do not serve")
    (folder / "secret.txt").write_text("do not serve")
    return folder


@pytest.fixture
async def visitor(root: Path) -> AsyncIterator[Visitor]:
    server = RunServer(root)
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Visitor(server, session)
    finally:
        await server.close()


async def test_the_list_shows_every_run_newest_first(visitor: Visitor) -> None:
    status, text = await visitor.get("/")
    assert status == 200
    assert re.findall(r'<a href="(/run/[^"]+)"', text) == ["/run/sums--m/new2/", "/run/sums--m/old1/"]
    assert '<td>0.750<span class="soft">0.689 .. 0.811</span></td>' in text
    assert '<td>sums<span class="soft">n=3, s=&quot;&lt;b&gt;&quot;</span></td>' in text
    assert "not finished" in text
    assert "<script" not in text


async def test_a_damaged_run_is_named_and_takes_no_other_with_it(visitor: Visitor, root: Path) -> None:
    huge = {"mean": 10**400, "stderr": "x", "low": [], "high": None}
    store(root / "a" / "huge", [row(0, 0)], summary={"rollouts": 1, "rewards": {"reward": huge}})
    store(root / "a" / "linked", [row(0, 0)])
    (root / "a" / "linked" / "metadata.json").unlink()
    (root / "a" / "linked" / "metadata.json").symlink_to(root / "secret.txt")
    (root / "a" / "names").mkdir()
    (root / "a" / "names" / "results.jsonl").write_text('{"example_id": 0, "reward": 1' + "0" * 400 + "}\n")
    (root / "a" / "names" / "metadata.json").write_text('{"env": {"a": 1}, "started": 7, "env_args": {"x": 1e999}}')
    status, text = await visitor.get("/")
    assert status == 200
    assert len(re.findall(r'<a href="(/run/[^"]+)"', text)) == 5
    for name in ("huge", "linked", "names"):
        status, text = await visitor.get(f"/run/a/{name}/")
        assert status == 200, text
        assert "do not serve" not in text


async def test_a_run_has_a_page_of_its_own_whose_transcripts_are_asked_for(visitor: Visitor) -> None:
    status, text = await visitor.get("/run/sums--m/old1/")
    assert status == 200
    assert "connect-src &#x27;self&#x27;" in text
    found = re.search(r'id="vf-data">(.*?)</script>', text)
    assert found
    data = json.loads(found[1])
    assert (data["live"], data["home"], data["total"], data["epoch"]) == (True, "/", 4, 0)
    assert "answer 1.1" in (await visitor.get("/run/sums--m/old1/block/0"))[1]
    assert (await visitor.json("/run/sums--m/old1/block/7"))["rows"] == []


async def test_a_live_run_gives_the_rows_that_came_in_since(visitor: Visitor, root: Path) -> None:
    before = await visitor.json("/run/sums--m/new2/rows?from=1")
    assert (before["total"], before["columns"]["example"], before["run"]["finished"]) == (1, [], False)
    with (root / "sums--m" / "new2" / "results.jsonl").open("a") as file:
        file.write(json.dumps(row(0, 1)) + "\n" + json.dumps(row(1, 0))[:30])
    after = await visitor.json("/run/sums--m/new2/rows?from=1")
    assert (after["total"], after["columns"]["generation"]) == (2, [1])
    assert after["run"]["measures"][0]["mean"] == 0.5
    assert (await visitor.json("/run/sums--m/new2/rows?from=0"))["columns"]["generation"] == [0, 1]


async def test_two_runs_are_compared_the_newer_against_the_older(visitor: Visitor) -> None:
    status, text = await visitor.get("/compare?run=sums--m%2Fnew2&run=sums--m%2Fold1")
    assert status == 200
    found = re.search(r'id="vf-data">(.*?)</script>', text)
    assert found
    data = json.loads(found[1])
    assert [run["name"] for run in data["runs"]] == ["sums--m/old1", "sums--m/new2"]
    assert data["difference"]["measures"]["reward"]["mean"] == -1.0
    assert data["home"] == "/"


def store_training(directory: Path, steps: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": n, "steps": 1, "reward": n / 4, "time/step_s": 1.0}) for n in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "run.json").write_text(
        json.dumps({"env": "sums", "model": "m", "max_steps": 8, "status": "running"})
    )


async def test_training_runs_are_listed_beside_evaluations_and_followed(visitor: Visitor, root: Path) -> None:
    store_training(root / "run", 2)
    store(root / "run" / "evals" / "step-2", [row(0, 0)])
    _, listed = await visitor.get("/")
    assert "/run/run/" in listed
    assert "/run/run/evals/step-2/" in listed
    (line,) = (line for line in listed.split("<tr>") if 'href="/run/run/"' in line)
    assert "<td>training</td>" in line
    assert '<td>0.500</td><td>2 of 8 steps<span class="soft">running</span></td>' in line
    assert "checkbox" not in line
    _, page = await visitor.get("/run/run/")
    assert "connect-src &#x27;self&#x27;" in page
    found = re.search(r'id="vf-data">(.*?)</script>', page)
    assert found
    data = json.loads(found[1])
    assert (data["live"], data["head"]["steps"]) == (True, 2)
    known = urllib.parse.quote(data["version"])
    assert await visitor.get(f"/run/run/training?known={known}") == (204, "")
    store_training(root / "run", 3)
    assert (await visitor.json(f"/run/run/training?known={known}"))["head"]["steps"] == 3
    for path in ("/run/run/rows", "/run/run/block/0", "/run/sums--m/old1/training"):
        assert (await visitor.get(path))[0] == 404


def test_the_folder_of_a_run_shows_the_run_and_its_evaluations(tmp_path: Path) -> None:
    store_training(tmp_path / "run", 1)
    store(tmp_path / "run" / "evals" / "step-1" / "easy", [row(0, 0)])
    assert set(find_runs(tmp_path / "run")) == {"run", "evals/step-1/easy"}
    assert set(find_runs(tmp_path / "run" / "evals" / "step-1" / "easy")) == {"easy"}


def test_a_run_that_cannot_be_read_takes_no_other_from_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        store_training(tmp_path / name, 1)
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if "theirs" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert set(find_runs(tmp_path)) == {"mine"}


@pytest.mark.parametrize(
    "path",
    [
        "/run/../secret.txt/", "/run/..%2fsecret.txt/", "/run/%2e%2e/%2e%2e/", "/run/secret.txt/", "/run//etc/",
        "/run/sums--m/old1/results.jsonl", "/run/sums--m/../../block/0", "/run/sums--m/rows", "/run/sums--m/old1",
        "/secret.txt", "/../secret.txt", "/run/sums--m/old1/block/-1", "/run/sums--m/old1/block/x",
        "/compare?run=..&run=sums--m/old1",
    ],
)  # fmt: skip
async def test_nothing_but_runs_is_served(visitor: Visitor, path: str) -> None:
    status, text = await visitor.get(path)
    assert status == 404
    assert "do not serve" not in text


@pytest.mark.parametrize(
    "path", ["/run/sums--m/old1/rows?from=x", "/run/sums--m/old1/rows?from=-1", "/compare?run=a"]
)
async def test_what_makes_no_sense_is_a_bad_request(visitor: Visitor, path: str) -> None:
    assert (await visitor.get(path))[0] == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_written(visitor: Visitor, method: str, root: Path) -> None:
    before = everything_under(root)
    for path in ("/", "/run/sums--m/old1/", "/compare"):
        assert (await visitor.get(path, method=method))[0] == 405
    assert everything_under(root) == before


async def test_pages_tell_browsers_to_keep_them_to_themselves(visitor: Visitor) -> None:
    for path in ("", "nothing", "run/sums--m/old1/rows"):
        async with visitor.session.get(visitor.server.url + path) as answer:
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert answer.headers["Cache-Control"] == "no-store"


async def test_names_of_runs_are_escaped(tmp_path: Path) -> None:
    store(tmp_path / "<b>&'\"--m #?%" / "1", [row(0, 0)], env="<script>alert(1)</script>")
    server = RunServer(tmp_path)
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            visitor = Visitor(server, session)
            text = (await visitor.get("/"))[1]
            assert "<b>" not in text
            assert "<script" not in text
            address = re.search(r'<a href="([^"]+)"', text)
            assert address
            assert urllib.parse.unquote(address[1]).startswith("/run/<b>&'\"--m #?%/1")
            assert (await visitor.get(address[1]))[0] == 200
    finally:
        await server.close()


async def test_a_run_that_is_deleted_is_not_found(visitor: Visitor, root: Path) -> None:
    await visitor.json("/run/sums--m/new2/rows")
    (root / "sums--m" / "new2" / "results.jsonl").unlink()
    assert (await visitor.get("/run/sums--m/new2/rows"))[0] == 404


def test_it_listens_on_loopback_ends_cleanly_on_ctrl_c_and_says_where_it_is(root: Path) -> None:
    command = [sys.executable, "-m", "verifiers.cli.main", "view", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline()
        port = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert port
        with socket.create_connection(("127.0.0.1", int(port[1])), timeout=5):
            # a browser that keeps its connection does not keep the command
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_folder_that_is_not_there_and_a_port_that_is_taken_are_usage_errors(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert view([str(tmp_path / "missing")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert view([str(root), "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use" in capsys.readouterr().err
    assert view([str(root), "--port", "70000"]) == 2
