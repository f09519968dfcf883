"""Our trainer, with the embedded server as a process of its own on one thread each; a real model in one process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Told, arguments, environment, graded, grades_of, peft_config, settings

import verifiers as vf


@contextlib.contextmanager
def served(asked: dict[str, Any]) -> Iterator[str]:
    """Return a rollout server that answers late."""
    out = Path(asked["output_dir"])
    port_file = out / "port"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("server.py")), "--model", asked["model"]]
    command += ["--port", "0", "--port-file", str(port_file), "--threads", str(asked["server_threads"])]
    command += ["--parent-pid", str(os.getpid())]
    environ = {**os.environ, "VERIFIERS_BENCHMARK_LATENCY_S": str(asked["latency_s"])}
    with open(out / "server.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        try:
            while not port_file.exists():
                if server.poll() is not None:
                    sys.exit(f"the server ended: {(out / 'server.log').read_text()[-2000:]}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}/v1"
        finally:
            server.terminate()
            server.wait()


def noted(env: Any, asked: dict[str, Any]) -> Any:
    """Return the environment, or in a run with faults the same prompts with grades that are noted and may fail."""
    grades = grades_of(asked)
    if grades is None:
        return env

    def reward(prompt: Any, completion: Any, answer: str) -> float:
        return grades.reward(prompt[-1]["content"], graded(completion[-1]["content"], answer, asked))

    rows = [{"question": row["question"], "answer": row["answer"]} for row in env.get_dataset()]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[reward]))


def main() -> None:
    asked = arguments()
    torch.set_num_threads(asked["threads"])
    with contextlib.nullcontext(None) if asked.get("real") else served(asked) as url:
        # in turns with all cores, in one process, as vf-train does it where a run file names no server
        where = {"rollout_device": "cpu"} if url is None else {"server_url": url}
        args = vf.GRPOConfig(num_batches_ahead=asked["num_batches_ahead"], **where, **settings(asked))
        told = Told(asked["target"], asked["window"])
        env = noted(environment(asked), asked)
        trainer = vf.GRPOTrainer(asked["model"], env, args, callbacks=[told], peft_config=peft_config(asked))
        if not asked.get("real"):
            trainer.train(resume_from_checkpoint=bool(asked.get("save_steps")))
            return
        before = trainer.evaluate()["eval_reward"]
        trainer.train()
        print(json.dumps({"gain": trainer.evaluate()["eval_reward"] - before}), flush=True)


if __name__ == "__main__":
    main()
