"""A registry says where models are served; it is data, never code, and holds no keys."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.inference.endpoint import HttpBackend
from verifiers.inference.endpoint_registry import EndpointEntry, find_endpoint, load_endpoints, open_backend
from verifiers.inference.responses_api import ResponsesBackend
from verifiers.inference.server_pool import ServerPool
from verifiers.testing import FakeOpenAIServer

CANARY = "sk-canary-0123456789"
WHOLE = """
[endpoints.small]
model = "my-model"
url = "http://127.0.0.1:8000/v1/"

[endpoints.big]
model = "big-model"
urls = ["http://gpu1:8000/v1", "http://gpu2:8000/v1"]
key_var = "GPU_KEY"
headers = { X-Team = "blue" }
header_vars = { X-Token = "GPU_TOKEN" }
max_concurrent = 64
requests_per_second = 2.5
attempt_timeout_s = 30
api = "responses"
"""


def registry(tmp_path: Path, text: str, name: str = "endpoints.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_toml_registry_gives_its_entries(tmp_path: Path) -> None:
    entries = load_endpoints(registry(tmp_path, WHOLE))
    assert entries["small"] == EndpointEntry("small", "my-model", ("http://127.0.0.1:8000/v1",))
    assert entries["big"] == EndpointEntry(
        "big",
        "big-model",
        ("http://gpu1:8000/v1", "http://gpu2:8000/v1"),
        "GPU_KEY",
        {"X-Team": "blue"},
        {"X-Token": "GPU_TOKEN"},
        64,
        2.5,
        30,
        "responses",
    )


def test_the_classic_file_gives_the_same_entries(tmp_path: Path) -> None:
    text = '"""Where models are."""\nENDPOINTS = {"m": {"model": "org/m", "url": "http://h:1/v1", "key": "H_KEY"}}\n'
    assert load_endpoints(registry(tmp_path, text, "endpoints.py")) == {
        "m": EndpointEntry("m", "org/m", ("http://h:1/v1",), "H_KEY")
    }
    annotated = text.replace("ENDPOINTS =", "ENDPOINTS: dict[str, dict[str, str]] =")
    assert "m" in load_endpoints(registry(tmp_path, annotated, "endpoints.py"))


@pytest.mark.parametrize(
    "text",
    [
        'import pathlib\npathlib.Path("ran").touch()\nENDPOINTS = {"m": {"model": "m", "url": "http://h/v1"}}',
        'ENDPOINTS = {"m": {"model": "m", "url": __import__("pathlib").Path("ran").touch()}}',
        'ENDPOINTS = dict(m=__import__("pathlib").Path("ran").touch())',
    ],
)
def test_the_classic_file_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = registry(tmp_path, text, "endpoints.py")
    if text.startswith("import"):
        assert "m" in load_endpoints(path)
    else:
        with pytest.raises(ConfigError, match=r"line 1, is computed, and the file is not executed"):
            load_endpoints(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ('url = "http://h/v1"', "model: Field required"),
        ('model = "m"', "either url or urls"),
        ('model = "m"\nurl = "http://h/v1"\nurls = ["http://h/v1"]', "either url or urls"),
        ('model = "m"\nurl = "h:8000"', "the base URL 'h:8000' is not an HTTP address"),
        ('model = "m"\nurls = []', "urls: Tuple should have at least 1 item"),
        ('model = "m"\nurl = "http://h/v1"\nkeyvar = "K"', "the unknown setting 'keyvar'; it takes api, "),
        ('model = "m"\nurl = "http://h/v1"\nmax_concurrent = 0', "max_concurrent: Input should be greater than 0"),
        ('model = "m"\nurl = "http://h/v1"\nmax_concurrent = 2.5', "max_concurrent: Input should be a valid integer"),
        (
            'model = "m"\nurl = "http://h/v1"\nrequests_per_second = true',
            "requests_per_second: Input should be",
        ),
        ('model = "m"\nurl = "http://h/v1"\napi = "grpc"', "api: Input should be 'chat' or 'responses'"),
        ('model = "m"\nurl = "http://h/v1"\nheaders = { X = 1 }', "headers.X: Input should be a valid string"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, settings: str, text: str) -> None:
    path = registry(tmp_path, f"[endpoints.x]\n{settings}\n")
    with pytest.raises(ConfigError, match=text) as caught:
        load_endpoints(path)
    assert "endpoint 'x' in" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        f'key = "{CANARY}"',
        f'api_key = "{CANARY}"',
        f'key_var = "{CANARY}"',
        'key_var = "gsk_canary0123456789abcdef"',
        f'header_vars = {{ X-Token = "{CANARY}" }}',
        f'headers = {{ Authorization = "Bearer {CANARY}" }}',
    ],
)
def test_a_key_in_the_file_is_refused_and_not_quoted(tmp_path: Path, settings: str) -> None:
    path = registry(tmp_path, f'[endpoints.x]\nmodel = "m"\nurl = "http://h/v1"\n{settings}\n')
    with pytest.raises(ConfigError) as caught:
        load_endpoints(path)
    assert "canary" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_a_key_in_the_classic_file_or_in_a_url_is_refused_and_not_quoted(tmp_path: Path) -> None:
    for entry in (
        f'{{"model": "m", "url": "http://h/v1", "key": "{CANARY}"}}',
        f'{{"model": "m", "url": "http://me:{CANARY}@h/v1"}}',
        f'{{"model": "m", "key": "{CANARY}" oops}}',
    ):
        with pytest.raises(ConfigError) as caught:
            load_endpoints(registry(tmp_path, f'ENDPOINTS = {{"x": {entry}}}', "endpoints.py"))
        assert CANARY not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_a_name_in_small_letters_is_taken_where_such_a_variable_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("my_key", "x")
    path = registry(tmp_path, '[endpoints.x]\nmodel = "m"\nurl = "http://h/v1"\nkey_var = "my_key"\n')
    assert load_endpoints(path)["x"].key_var == "my_key"


def test_a_missing_name_or_file_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no endpoint 'tiny'; it has big, small"):
        find_endpoint("tiny", registry(tmp_path, WHOLE))
    assert find_endpoint("small", tmp_path / "endpoints.toml").model == "my-model"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_endpoints(tmp_path / "none.toml")
    for text, name in (("= no", "a.toml"), ("x = 1", "a.toml"), ("def", "a.py"), ("X = 1", "a.py")):
        with pytest.raises(ConfigError, match="the endpoint registry"):
            load_endpoints(registry(tmp_path, text, name))
    with pytest.raises(ConfigError, match="not a dict of dicts"):
        load_endpoints(registry(tmp_path, "ENDPOINTS = [1]", "a.py"))


async def test_an_entry_is_called_with_its_key_and_headers_and_holds_neither_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", f"{CANARY}\n")
    monkeypatch.setenv("THE_TOKEN", f"token-{CANARY}")
    ask: dict[str, Any] = {"model": "m", "messages": []}
    async with FakeOpenAIServer("4") as one, FakeOpenAIServer("4") as two:
        settings = (
            f'model = "m"\nurls = ["{one.url}", "{two.url}"]\nkey_var = "THE_KEY"\nheaders = {{ X-Team = "b" }}\n'
        )
        path = registry(tmp_path, f'[endpoints.x]\n{settings}header_vars = {{ X-Token = "THE_TOKEN" }}\n')
        entry = find_endpoint("x", path)
        backend = open_backend(entry)
        assert isinstance(backend, ServerPool)
        for _ in range(8):
            await backend.call("/chat/completions", ask)
        await backend.close()
        assert one.request_count + two.request_count == 8
        headers = (one.requests or two.requests)[0].headers
    assert headers["authorization"] == f"Bearer {CANARY}"
    assert (headers["x-team"], headers["x-token"]) == ("b", f"token-{CANARY}")
    assert CANARY not in f"{entry!r} {backend!r}"
    assert CANARY not in json.dumps(dataclasses.asdict(entry))
    monkeypatch.delenv("THE_TOKEN")
    with pytest.raises(ConfigError, match="'THE_TOKEN', which is not set"):
        open_backend(entry)


def test_one_url_is_no_balancing_and_the_deadline_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    entry = EndpointEntry("x", "m", ("http://h/v1",), "NO_SUCH_KEY", attempt_timeout_s=30.0)
    backend = open_backend(entry)
    assert type(backend) is HttpBackend
    assert (backend.api_key, backend.endpoint.timeout_s) == ("EMPTY", 30.0)
    shorter = open_backend(entry, attempt_timeout_s=5.0)
    assert isinstance(shorter, HttpBackend)
    assert shorter.endpoint.timeout_s == 5.0
    assert type(open_backend(dataclasses.replace(entry, api="responses"))) is ResponsesBackend
