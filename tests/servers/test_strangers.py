"""The requests of strangers, refused on all servers: foreign web pages, foreign names, bad keys, bad bodies."""

from __future__ import annotations

import functools
import gzip
import http.client
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from tiny_models import two_role_tokenizer, write_random_qwen3
from verifiers_dataserver.config import load_configuration
from verifiers_dataserver.serving import load, running

from verifiers.server_process import bind

KEY = "a-key-of-these-tests-that-no-log-has"
MARK = "bytes-of-a-request-that-no-log-has"
MIB = 2**20
TEMPLATE = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<bot>"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
Headers = Mapping[str, str | bytes]


class Server(NamedTuple):
    """A process that serves, and what may be asked of it."""

    url: str
    log: Path
    pid: int
    key: str | None
    get: str
    post: tuple[str, Any] | None

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def bearer(self) -> dict[str, str | bytes]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str | bytes) -> tuple[int, str]:
        """Return status and text; names of headers are written with underscores."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        with closing(connection):
            return self._answer(connection, method, path, body, headers)

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: Headers
    ) -> tuple[int, str]:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent: dict[str, str | bytes] = {"Host": self.host}
        if body is not None:
            sent |= {**JSON, "Content-Length": str(len(body))}
        for name, value in (sent | {name.replace("_", "-"): value for name, value in headers.items()}).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def gets(self, **headers: str | bytes) -> int:
        return self.ask("GET", self.get, **{**self.bearer, **headers})[0]

    def posts(self, body: bytes | None = None, **headers: str | bytes) -> tuple[int, str]:
        assert self.post is not None
        path, plain = self.post
        data = json.dumps(plain).encode() if body is None else body
        return self.ask("POST", path, data, **{**self.bearer, **headers})


def error_of(text: str) -> str:
    """Return the sentence of an error object."""
    return str(json.loads(text)["error"]["message"])


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[str, Path, int]]]:
    """Return a function that starts a module as a process, and waits for the address that it prints."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:

        def begin(*command: str | Path) -> tuple[str, Path, int]:
            log = folder / f"{len(list(folder.iterdir()))}.log"
            variables = {"STRANGERS_KEY": KEY, "VF_GATEWAY_KEY": KEY, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", *map(str, command)],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=tmp_path_factory.mktemp("cwd"),
                    env={**os.environ, **variables},
                )
            stack.callback(process.wait, 60)
            stack.callback(process.kill)
            while not (found := re.search(r"(http://127\.0\.0\.1:\d+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
            return found[1], log, process.pid

        yield begin


@pytest.fixture(scope="module")
def serve(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Server]:
    """Return a function that gives a server by its name, started at the first call."""
    folder = tmp_path_factory.mktemp("files")

    def embedded(*flags: str) -> tuple[str, Path, int]:
        model = folder / "model"
        if not model.exists():
            write_random_qwen3(model, two_role_tokenizer(TEMPLATE), max_position_embeddings=64)
        served = ("--served-model-name", "m", "--port", "0", "--threads", "1", "--max-body-mib", "1")
        return start("verifiers_embedded", "--model", model, *served, *flags)

    def dataserver(*flags: str) -> tuple[str, Path, int]:
        (folder / "rows.jsonl").write_text('{"prompt": "q", "answer": "a"}\n')
        datasets = {"d": {"jsonl": "rows.jsonl", "graders": ["exact"]}}
        config = folder / "config.json.yaml"
        config.write_text(json.dumps({"datasets": datasets, "server": {"max_body_mib": 1}}))
        return start("verifiers_dataserver", config, "--port", "0", *flags)

    @functools.cache
    def begin(name: str) -> Server:
        graded = ("/v2/grade", {"items": [{"sample_id": "d:0", "completion": "a", "completion_index": 0}]})
        if name == "vf-serve":
            return Server(*embedded(), None, "/v1/models", ("/v1/chat/completions", CHAT))
        if name == "vf-serve with a key":
            flags = ("--api-key-var", "STRANGERS_KEY")
            return Server(*embedded(*flags), KEY, "/v1/models", ("/v1/chat/completions", CHAT))
        if name == "vf-dataserver":
            return Server(*dataserver(), None, "/v2/meta", graded)
        if name == "vf-dataserver with a token":
            return Server(*dataserver("--token-var", "STRANGERS_KEY"), KEY, "/v2/meta", graded)
        if name == "vf-gateway":
            gateway = start("verifiers.cli.gateway", "-m", "fake", "--port", "0", "--drain-timeout", "0.1")
            opened = Server(*gateway, KEY, "/sessions/none", ("/sessions", {"prompt": "q"}))
            session = json.loads(opened.posts()[1])
            return opened._replace(get=f"/sessions/{session['id']}")
        store = folder / "runs" / "sums--m" / "1"
        store.mkdir(parents=True)
        (store / "results.jsonl").write_text("")
        (store / "metadata.json").write_text('{"env": "sums", "model": "m"}')
        return Server(*start("verifiers.cli.main", "view", folder / "runs", "--port", "0"), None, "/", None)

    return begin


OPEN = ["vf-serve", "vf-dataserver", "vf-view"]
KEYED = ["vf-serve with a key", "vf-dataserver with a token", "vf-gateway"]
WITH_BODIES = ["vf-serve", "vf-serve with a key", "vf-dataserver", "vf-gateway"]


@pytest.fixture
def server(serve: Any, request: pytest.FixtureRequest) -> Server:
    return serve(request.param)


def on(*names: str) -> pytest.MarkDecorator:
    # a second process that loads torch
    marks = {"vf-serve with a key": pytest.mark.slow}
    params = [pytest.param(name, marks=marks.get(name, ())) for name in names]
    return pytest.mark.parametrize("server", params, indirect=True)


@on(*OPEN, *KEYED)
def test_a_page_of_another_origin_is_refused(server: Server) -> None:
    for sent in (
        {"Origin": "http://evil.example"},
        {"Origin": f"https://{server.host}.evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site", "Origin": "http://localhost:1"},
    ):
        assert server.gets(**sent) == 403, sent
        if server.post is not None:
            status, text = server.posts(**sent)
            assert (status, "origin" in error_of(text)) == (403, True), sent
            assert server.posts(**sent, Content_Type="text/plain")[0] == 403, sent


@on(*OPEN, *KEYED)
def test_programs_and_a_servers_own_pages_are_answered(server: Server) -> None:
    for site in (None, "none", "same-origin", "same-site"):
        headers = {} if site is None else {"Sec_Fetch_Site": site}
        own = {"Origin": server.url} if site == "same-origin" else {}
        assert server.gets(**headers) == 200, site
        if server.post is not None:
            assert server.posts(**headers, **own)[0] == 200, site


FOREIGN = [
    "evil.example", "evil.example:{port}", "127.0.0.1:{port}.evil.example", "127.0.0.1.evil.example:{port}",
    "localhost.evil.example", "192.168.0.1:{port}", "127.0.0.1:{port}@evil.example", "",
]  # fmt: skip


@on(*OPEN)
def test_a_name_of_another_machine_is_refused_on_a_loopback_address(server: Server) -> None:
    for host in FOREIGN:
        named = host.format(port=server.host.rpartition(":")[2])
        assert server.gets(Host=named) == 403, named
        assert server.gets(Host=named, Origin=f"http://{named}", Sec_Fetch_Site="same-origin") == 403, named
        if server.post is not None:
            status, text = server.posts(Host=named)
            assert (status, "Host header" in error_of(text)) == (403, True), named


@on("vf-serve", "vf-dataserver")
def test_a_tunnel_from_another_port_is_answered(server: Server) -> None:
    hosts = ("localhost", "LOCALHOST:9", "127.0.0.1", "127.0.0.2:9", "[::1]:9")
    assert {host: server.gets(Host=host) for host in hosts} == dict.fromkeys(hosts, 200)


@on(*KEYED)
def test_a_proxy_may_give_a_server_with_a_key_any_name(server: Server) -> None:
    assert server.gets(Host="models.example") == 200
    assert server.gets(Host="models.example", Authorization="Bearer wrong") == 401


async def test_a_server_that_other_machines_reach_is_answered_by_any_name(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "answer": "a"}\n')
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"datasets": {"d": {"jsonl": "rows.jsonl", "graders": ["exact"]}}}))
    with bind("0.0.0.0", 0) as listener:
        async with running(load(load_configuration(config)), listener) as url, aiohttp.ClientSession() as session:
            for headers, status in (({"Host": "data.example"}, 200), ({"Origin": "http://evil.example"}, 403)):
                async with session.get(f"{url}/v2/meta", headers=headers) as response:
                    assert response.status == status


@on(*KEYED)
def test_the_word_bearer_may_be_written_in_either_case(server: Server) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert server.gets(Authorization=f"{scheme} {KEY}") == 200, scheme
        assert server.posts(Authorization=f"{scheme} {KEY}")[0] == 200, scheme


@on(*KEYED)
def test_a_key_that_is_wrong_or_not_even_text_is_401(server: Server) -> None:
    not_text: list[str | bytes] = [b"Bearer \xff\xfe", "Bearer ключ".encode(), b"\xff"]
    for given in (*not_text, f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer", ""):
        assert server.gets(Authorization=given) == 401, given
        status, text = server.posts(Authorization=given)
        assert (status, "Bearer" in error_of(text)) == (401, True), given


def plain_body(server: Server) -> bytes:
    assert server.post is not None
    return json.dumps(server.post[1]).encode()


@on(*WITH_BODIES)
def test_a_packed_body_is_read_as_the_plain_one(server: Server) -> None:
    body = plain_body(server)
    for encoding, packed in (
        ("gzip", gzip.compress(body)),
        ("GZIP", gzip.compress(body)),
        ("deflate", zlib.compress(body)),
        ("identity", body),
    ):
        assert server.posts(packed, Content_Encoding=encoding)[0] == 200, encoding


@on(*WITH_BODIES)
def test_a_body_that_is_not_the_gzip_it_claims_to_be_is_400(server: Server) -> None:
    body = plain_body(server)
    packed = gzip.compress(body)
    for name, sent in {
        "garbage": b"\x1f\x8bxxxx",
        "plain": body,
        "empty": b"",
        "cut": packed[:-9],
        "wrong sum": packed[:-4] + b"abcd",
        "longer": packed + b"more",
        "zlib": zlib.compress(body),
    }.items():
        status, text = server.posts(sent, Content_Encoding="gzip")
        assert (status, "the body cannot be read" in error_of(text)) == (400, True), name
    assert server.posts()[0] == 200


@on(*WITH_BODIES)
def test_an_encoding_that_is_not_known_is_415(server: Server) -> None:
    for encoding in ("zstd", "br", "compress", "gzip, gzip", "aws-chunked", ""):
        status, text = server.posts(gzip.compress(plain_body(server)), Content_Encoding=encoding)
        assert (status, "Content-Encoding" in error_of(text)) == (415, True), encoding


def zeros(mib: int) -> bytes:
    """Return gzip data that unpacks to this many MiB; its check sum, which stands at the end, is wrong."""
    packing = zlib.compressobj(9, wbits=31)
    head = packing.compress(bytes(MIB)) + packing.flush(zlib.Z_FULL_FLUSH)
    block = packing.compress(bytes(MIB)) + packing.flush(zlib.Z_FULL_FLUSH)
    return head + (mib - 1) * block + packing.flush()


def peak_mib(server: Server) -> int:
    (kib,) = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())
    return int(kib) // 1024


@on(*WITH_BODIES)
def test_a_body_that_unpacks_beyond_the_limit_is_413_before_all_of_it_is_unpacked(server: Server) -> None:
    before = peak_mib(server)
    for _ in range(2):
        status, text = server.posts(zeros(800), Content_Encoding="gzip")
        assert (status, "MiB" in error_of(text)) == (413, True)
    assert peak_mib(server) - before < 400
    if server.post is not None and server.post[0] != "/sessions":
        status, text = server.posts(b" " * (MIB + 1))
        assert (status, "1 MiB" in error_of(text)) == (413, True)


@on(*WITH_BODIES)
def test_half_of_a_surrogate_pair_is_no_failure_of_the_server(server: Server) -> None:
    body = plain_body(server).replace(b"hi", b"\\ud800").replace(b'"a"', b'"\\udfff"').replace(b'"q"', b'"\\ud83d"')
    assert server.posts(body)[0] in (200, 400)
    raw = body.replace(b"\\ud800", b"\xed\xa0\x80").replace(b"\\udfff", b"\xed\xb0\x80")
    assert server.posts(raw)[0] in (200, 400)


@on(*WITH_BODIES)
def test_no_byte_of_a_request_and_no_key_is_in_a_log(server: Server) -> None:
    assert server.post is not None
    marked = MARK.encode()
    for body in (marked, b"{" + marked, b'{"' + marked + b'\\ud800": 1}', b"\xff" + marked):
        assert server.posts(body)[0] >= 400
    for encoding in ("gzip", MARK):
        assert server.posts(marked, Content_Encoding=encoding)[0] >= 400
    for header in (b"Bearer \xff" + marked, b"Bearer " + marked):
        server.posts(Authorization=header)
    host, port = server.host.split(":")
    head = f"POST {server.post[0]} HTTP/1.1\r\nHost: {server.host}\r\nAuthorization: Bearer {KEY}\r\n".encode()
    for rest in (
        b"x: \x00" + marked + b"\r\n\r\n",
        b"bad header" + marked + b"\r\n\r\n",
        b"Content-Length: " + marked + b"\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + marked + b"\r\n",
        b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n" + marked,
        marked,
    ):
        for start in (head, head.replace(b"Bearer ", b"Bearer \x01"), marked + b" " + head):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(start + rest)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
    assert server.gets() == 200
    log = server.log.read_text()
    assert MARK not in log
    assert KEY not in log


CONTROL = [
    ("/pause?mode=keep", {}),
    ("/resume", {}),
    ("/update_weight_version", {"new_version": "1"}),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "nowhere"}}),
]


NOT_JSON = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json")


@on("vf-serve", "vf-serve with a key")
def test_a_route_that_changes_something_takes_json_alone(server: Server) -> None:
    for path, body in CONTROL:
        data = json.dumps(body).encode()
        for kind in NOT_JSON:
            status, text = server.ask("POST", path, data, **server.bearer, Content_Type=kind)
            assert (status, "application/json" in error_of(text)) == (415, True), (path, kind)
        assert server.ask("POST", path, b"", **server.bearer, Content_Type="text/plain")[0] == 415, path
        wanted = 400 if "rpc" in path else 200
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            assert server.ask("POST", path, data, **server.bearer, Content_Type=kind)[0] == wanted, path
    assert server.ask("POST", "/resume", **server.bearer)[0] == 200
    assert server.ask("GET", "/weight_info", **server.bearer)[0] == 200


@on("vf-serve", "vf-dataserver", "vf-gateway")
def test_routes_that_change_nothing_or_ask_for_a_key_take_what_curl_sends(server: Server) -> None:
    assert server.posts(Content_Type="application/x-www-form-urlencoded")[0] == 200


@on("vf-gateway")
def test_a_session_is_told_the_address_that_the_gateway_listens_on(server: Server) -> None:
    for host in ("evil.example", "evil.example:80", server.host):
        status, text = server.posts(Host=host)
        assert (status, json.loads(text)["base_url"]) == (200, f"{server.url}/v1")


@on("vf-gateway")
def test_an_agents_refusal_has_the_shape_of_its_wire_format(server: Server) -> None:
    session = json.loads(server.posts()[1])
    bearer = {"Authorization": f"bearer {session['key']}"}
    refused: tuple[tuple[dict[str, str | bytes], int], ...] = (
        ({"Origin": "http://evil.example"}, 403),
        ({"Content_Encoding": "zstd"}, 415),
        ({"Content_Encoding": "gzip"}, 400),
        ({"Authorization": b"Bearer \xff"}, 401),
    )
    for path, (headers, status) in itertools.product(("chat/completions", "responses", "messages"), refused):
        found, text = server.ask("POST", f"/v1/{path}", b"{}", **{**bearer, **headers})
        assert (found, json.loads(text).get("type") == "error") == (status, path == "messages")
        assert error_of(text)


@on("vf-serve")
def test_half_of_a_surrogate_pair_is_refused_wherever_a_text_is_tokenized(server: Server) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "\udfff"}]}),
        ("/v1/completions", {"model": "m", "prompt": "a\ud83d"}),
        ("/v1/chat/completions", {**CHAT, "stop": "\ud800"}),
        ("/update_weight_version", {"new_version": "\ud800"}),
    ):
        status, text = server.ask("POST", path, json.dumps(body).encode())
        assert (status, bool(error_of(text))) == (400, True), path
    whole = json.dumps({"prompt": "\U0001f600"}).encode()
    assert server.ask("POST", "/tokenize", whole)[0] == 200
