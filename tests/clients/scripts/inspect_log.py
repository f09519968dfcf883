"""A log that vf-export wrote, in inspect_ai's hands: its reader, its summaries, and the server of `inspect view`."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries

path = sys.argv[1]
log = read_eval_log(path)
assert (log.status, log.eval.task, log.eval.model) == ("success", "sums", "org/m"), log.status
assert (log.results.total_samples, log.results.completed_samples, len(log.samples)) == (6, 5, 6)
scores = {score.name: score.metrics["mean"].value for score in log.results.scores}
assert abs(scores["reward"] - 2 / 3) < 1e-9, scores
assert len(read_eval_log_sample_summaries(path)) == 6
sample = read_eval_log_sample(path, id=0, epoch=2)
assert [message.role for message in sample.messages] == ["system", "user", "assistant", "tool", "assistant"]
assert len(sample.messages[0].content) > 2000
assert sample.messages[2].tool_calls[0].arguments == {"a": 1}
assert sample.scores["reward"].value == 1.0
assert read_eval_log_sample(path, id=2, epoch=2).error.message.startswith("ProviderError")

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
view = [sys.executable, "-m", "inspect_ai", "view", "start", "--log-dir", os.path.dirname(path)]
server = subprocess.Popen([*view, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL)
try:
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/logs", timeout=5) as response:
                listed = json.load(response)["files"]
            break
        except OSError:
            assert server.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
    assert [file["task"] for file in listed] == ["sums"], listed
    name = urllib.request.quote(listed[0]["name"], safe="")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/log-headers?file={name}", timeout=10) as response:
        (header,) = json.load(response)
    assert header["status"] == "success", header
finally:
    server.terminate()
    server.wait()
print("ok")
