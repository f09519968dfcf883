"""Images over HTTP: read as transformers reads them, and refused in one sentence, with nothing fetched or decoded."""

from __future__ import annotations

import base64
import http.client
import json
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded_images import GOOD, JPEG, LARGE, NO_IMAGES, READ, chunk, noise, png, saved
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration
from verifiers_embedded.engine.loading import load_model
from verifiers_embedded.in_process_server import InProcessServer

from verifiers.inference.server_client import ServerClient
from verifiers.train.tiny_model.vision_model import make_vision_model
from verifiers.train.weight_sync.verification import read_capabilities

MOST_BODY = 46 * 2**20
MARK = "<|image_pad|>"
SAID = {"type": "text", "text": "a question of some length, so that what was computed for it is kept"}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    make_vision_model(directory)
    return directory


@pytest.fixture(scope="module")
def server(seeing: Path) -> Iterator[InProcessServer]:
    loaded = load_model(seeing, device="cpu", dtype="float32", max_model_len=1024, with_images=True)
    with InProcessServer(loaded, threads=1, max_images=2, max_body_bytes=MOST_BODY) as running:
        yield running


@pytest.fixture(scope="module")
def plain(seeing: Path) -> Any:
    """Return the model as transformers alone has it."""
    return Qwen3VLForConditionalGeneration.from_pretrained(seeing, dtype=torch.float32).eval()


def post(server: InProcessServer, path: str, body: Any) -> tuple[int, Any]:
    """Return status and answer; of a stream, its events."""
    host = server.url.removeprefix("http://").removesuffix("/v1")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.headers.get_content_type() == "text/event-stream":
        return answer.status, [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: {")]
    return answer.status, json.loads(text)


def asked(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    fixed = {"model": "policy", "max_tokens": 8, "seed": 3, "logprobs": True, "return_token_ids": True}
    return {**fixed, "messages": [{"role": role, "content": content}], **fields}


def chat(server: InProcessServer, content: Any, **fields: Any) -> dict[str, Any]:
    status, answer = post(server, "/v1/chat/completions", asked(content, **fields))
    assert status == 200, answer
    return answer


async def test_the_server_says_what_reads_images(server: InProcessServer) -> None:
    found = await read_capabilities(ServerClient(server.url))
    assert re.fullmatch(r"Qwen2VLImageProcessor\w* of transformers 5[\d.]+", found.image_reader or "")


def part(image: bytes, kind: str = "image/png") -> dict[str, Any]:
    return at(f"data:{kind};base64,{base64.b64encode(image).decode()}")


def at(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


# -- images that are read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
def test_a_model_sees_the_pixels_of_an_image_and_answers_as_in_transformers(
    server: InProcessServer, plain: Any, name: str
) -> None:
    image, pixels = READ[name]
    other = saved(noise(9, 32, 8))
    images = server.loaded.images
    assert images is not None
    for content, seen in (
        ([part(image), SAID], [saved(pixels)]),
        ([part(image), SAID, part(other)], [saved(pixels), other]),
    ):
        answer = chat(server, content)
        ids, sampled = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        read = images.of_images(seen)
        # a token for each square of 8 pixels
        assert ids.count(images.token_id) == read.tokens == (1 if name == "1x1" else 6) + 4 * (len(seen) - 1)
        whole = torch.tensor([ids + sampled])
        with torch.no_grad():
            logits = plain(input_ids=whole, **images.inputs(whole, [read], whole.device)).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
        reported = torch.tensor([entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]])
        assert (reported - expected).abs().max() < 1e-4
        body = {"messages": asked(content)["messages"]}
        assert post(server, "/tokenize", body)[1]["tokens"] == ids


def test_an_image_gives_the_same_tokens_beside_texts_and_images_and_in_a_stream(server: InProcessServer) -> None:
    content, unlike, n = [part(GOOD), SAID], [part(JPEG), SAID], 3
    alone, other = (
        [choice["token_ids"] for choice in chat(server, one, n=n)["choices"]] for one in (content, unlike)
    )
    assert alone != other
    crowd = [*(asked(one, n=n) for one in (content, unlike, content)), asked([SAID]), asked("x")]
    with ThreadPoolExecutor(len(crowd)) as threads:
        post(server, "/pause?mode=keep", {})
        asking = [threads.submit(post, server, "/v1/chat/completions", body) for body in crowd]
        while server.engine.counts["waiting"] < 3 * n + 2:
            time.sleep(0.001)
        post(server, "/resume", {})
        answers = [[choice["token_ids"] for choice in one.result(60)[1]["choices"]] for one in asking]
    assert answers[0] == answers[2] == alone
    assert answers[1] == other
    status, events = post(server, "/v1/chat/completions", asked(content, n=n, stream=True))
    streamed: list[list[int]] = [[] for _ in range(n)]
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids") or []
    assert (status, streamed) == (200, alone)


# -- images that are not ----------------------------------------------------------------------------------------

BASE64 = base64.b64encode(GOOD).decode()
UNWELCOME: dict[str, tuple[Any, str]] = {
    **{name: ([part(file), SAID], "no whole image.*; give one of the formats") for name, file in NO_IMAGES.items()},
    **{name: ([part(file), SAID], "larger than 16,777,216.*; scale it down") for name, file in LARGE.items()},
    "narrow": ([part(saved(Image.new("L", (1, 4000))))], r"4000\.0\); give it another size"),
    "wide": ([part(saved(Image.new("L", (4000, 1))))], r"4000\.0\); give it another size"),
    "no-base64": ([at("data:image/png;base64,!!!!")], "'data:image/png;base64,!!!!', is not base64.*; write it"),
    "not-ascii": ([at("data:image/png;base64,\xe9")], "is not base64.*; write it"),
    "spaces": ([at(f"data:image/png;base64, {BASE64}")], "is not base64.*without spaces"),
    "lines": ([at(f"data:image/png;base64,{BASE64[:76]}\n{BASE64[76:]}")], "is not base64.*ends of lines"),
    "cut-base64": ([at(f"data:image/png;base64,{BASE64[:77]}")], "is not base64.*; write it"),
    **{
        name: ([at(url)], f"given by {re.escape(repr(url[:60]))}, and nothing is fetched.*; give it as data:")
        for name, url in {
            "no-comma": "data:image/png;base64" + BASE64,
            "not-said-base64": "data:image/png," + BASE64,
            "no-url": "",
            "passwd": "/etc/passwd",
            "file-passwd": "file:///etc/passwd",
            "blob": "blob:x",
        }.items()
    },
    **{
        name: ([{"type": "image_url", **given}], "content of a message holds .*; give a text or a list of")
        for name, given in {
            "url-as-text": {"image_url": f"data:image/png;base64,{BASE64}"},
            "list": {"image_url": [part(GOOD)]},
            "no-url-field": {"image_url": {}},
            "url-null": {"image_url": {"url": None}},
            "no-image": {},
            "audio": {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
            "no-type": {"type": None, "text": "x"},
        }.items()
    },
    "part-as-text": (["x"], "holds 'x'; give a text or a list of"),
    "number": (5, "holds 5; give a text or a list of"),
    "three": ([part(GOOD)] * 3, "hold 3 images.*takes 2 .*; start it with --max-images 3"),
    "mark-beside-image": ([part(GOOD), {"type": "text", "text": MARK}], "2 places for images .*; leave the mark out"),
    "mark-alone": (f"what is {MARK}", "mark of an image .*; leave it out of texts"),
}


@pytest.fixture(scope="module")
def peak_mib() -> Callable[[], float]:
    """Return a function that returns how much larger the process has been than before the first of these tests."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return lambda: (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit


def refusal(server: InProcessServer, body: Any, status: int = 400) -> str:
    """Return the sentence of a refusal, after which the server answers as before."""
    found, answer = post(server, "/v1/chat/completions", body)
    assert found == status, answer
    said: str = answer["error"]["message"]
    assert not re.search(r"0x[0-9a-f]{4}|object at|\bPIL\b|internal error|Traceback|\n", said)
    assert 20 < len(said) < 400
    assert chat(server, [part(GOOD)], max_tokens=1)["usage"]["completion_tokens"] == 1
    return said


@pytest.mark.parametrize("name", UNWELCOME)
def test_an_unwelcome_image_is_refused_in_one_sentence(
    server: InProcessServer, peak_mib: Callable[[], float], name: str
) -> None:
    content, sentence = UNWELCOME[name]
    said = refusal(server, asked(content))
    assert re.search(sentence, said), said
    assert peak_mib() < 300


@pytest.mark.parametrize(
    ("size", "status", "sentence"), [(33, 400, "34,603,00. bytes is larger"), (35, 413, "than 46 MiB")]
)
def test_a_file_beyond_the_limits_is_refused_in_bounded_memory(
    server: InProcessServer, peak_mib: Callable[[], float], size: int, status: int, sentence: str
) -> None:
    before, behind = json.dumps(asked([at("data:image/png;base64,HERE")])).encode().split(b"HERE")
    said = refusal(server, b"".join((before, b"A" * (size * 2**20 * 4 // 3), behind)), status)
    assert re.search(sentence, said), said
    assert peak_mib() < 300


def test_nothing_is_fetched_or_read_from_disk(server: InProcessServer, tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(GOOD)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"127.0.0.1:{listener.getsockname()[1]}/image.png"
        schemes = [f"{scheme}://{address}" for scheme in ("http", "https", "ftp")]
        for url in (*schemes, str(file), file.as_uri(), f"file:{file}"):
            assert "nothing is fetched or read here" in refusal(server, asked([at(url)]))
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_images_that_look_odd_are_read(server: InProcessServer, peak_mib: Callable[[], float]) -> None:
    alike = [part(GOOD, kind) for kind in ("image/tiff", "text/html", "", "image/png;name=x")]
    alike.append({"type": "image_url", "image_url": {"url": alike[0]["image_url"]["url"], "detail": "low"}})
    assert len({str(chat(server, [one])["choices"][0]["token_ids"]) for one in alike}) == 1
    for image in (
        png(4096, 4095, bytes(4095 * 513), depth=1, color=0),
        GOOD[:-16] + bytes(4) + GOOD[-12:],
        png(8, 8, bytes(200), chunk(b"tEXt", b"a\0" + b"a" * 2**21)),
        saved(noise(), "MPO", save_all=True, append_images=[noise(1)]),
    ):
        chat(server, [part(image)])
    # 16 million pixels are some 300 MiB as the processor reads them, and up to 400 beside other tests
    assert peak_mib() < 450


def test_a_role_whose_images_the_template_does_not_show_is_refused(server: InProcessServer) -> None:
    for role in ("user", "tool"):
        assert post(server, "/v1/chat/completions", asked([part(GOOD)], role))[0] == 200
    for role in ("system", "developer", "assistant"):
        assert "template" in refusal(server, asked([part(GOOD)], role))


@pytest.mark.parametrize("kind", ["without-tower", "with-none-allowed", "of-text"])
def test_a_server_that_takes_no_images_names_the_flag(seeing: Path, model_dir: Path, kind: str) -> None:
    directory = model_dir if kind == "of-text" else seeing
    loaded = load_model(
        directory, device="cpu", dtype="float32", max_model_len=None, with_images=kind == "with-none-allowed"
    )
    with InProcessServer(loaded, threads=1, max_images=2 if kind == "of-text" else 0) as server:
        for path in ("/v1/chat/completions", "/tokenize"):
            status, answer = post(server, path, {"messages": asked([part(GOOD)])["messages"], "model": "policy"})
            assert status == 400
            said = answer["error"]["message"]
            assert re.search("hold 1 images, and this server takes 0 .*; start it with --max-images 1$", said), said
        assert post(server, "/v1/chat/completions", asked("x"))[0] == 200


def test_marks_in_a_text_beside_images_that_are_not_shown_end_nothing(server: InProcessServer) -> None:
    image = part(saved(noise()))
    unseen = {"role": "assistant", "content": [image, image]}
    body = asked("<|image_pad|><|image_pad|>")
    body["messages"].insert(0, unseen)
    status, _ = post(server, "/v1/chat/completions", body)
    assert status == 400
    assert chat(server, [image])["choices"]


def test_a_text_is_scored_alike_beyond_one_piece_and_after_images(server: InProcessServer, plain: Any) -> None:
    ids = [3 + place % 90 for place in range(400)]
    body = {"model": "policy", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    with torch.no_grad():
        logps = plain(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    found = [
        one[str(token)]["logprob"]
        for one, token in zip(answer["choices"][0]["prompt_logprobs"][1:], ids[1:], strict=True)
    ]
    wanted = logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (torch.tensor(found) - wanted).abs().max() < 1e-4
