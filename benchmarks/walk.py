"""The way through the package's files: of one rollout, of one training block, and of one evaluation.

    python benchmarks/walk.py [--no-training] [--trail]

A profile hook notes every Python function of `verifiers` that is entered (a coroutine is entered again each time it
resumes), in all threads of this process; the server is a process of its own. A file is counted once; a move is an
entry whose file is another than that of the entry before it.

The rollout: a single turn with one reward and token ids as training has it, a block of its own in an
`AsyncBatchGenerator` with a `ServerPool`, from `submit_batch` to `get_batch` and after seven others: nothing is
loaded or prepared in it. The shortest of three counts, as an answer may come in two pieces on a busy machine.

The block: from `GRPOTrainer.train()` to the call of `_compute_loss`, with one prompt of two rollouts.

The evaluation: the whole of `vf-eval` with one rollout of one prompt, after another such command in this process.

Ends with one line of JSON: files, moves and calls of each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from fake_process import server_process

# benchmarks/trl.py would stand before the library of its name
with contextlib.suppress(ValueError):
    sys.path.remove(str(Path(__file__).resolve().parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import verifiers as vf

ROOT = f"{Path(vf.__file__).parent}{os.sep}"
PLAYED_BEFORE, WALKED = 7, 3
ANSWER = "The answer is 42."
QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]


class Walk:
    """The functions of the package that were entered, as (file, name), while it is switched on."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []
        self._is_on = False
        # threads that start later take it over; it notes nothing until it is switched on
        threading.setprofile(self._note)

    def start(self) -> None:
        self._is_on = True
        sys.setprofile(self._note)

    def stop(self) -> None:
        self._is_on = False
        sys.setprofile(None)

    def counts(self) -> dict[str, int]:
        files = [file for file, _ in self.entries]
        moves = sum(one != other for one, other in itertools.pairwise(files))
        return {"files": len(set(files)), "moves": moves, "calls": len(files)}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.entries.append((frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname))


def load_environment() -> vf.SingleTurnEnv:
    def correct(completion: vf.Messages, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    rows = [{"prompt": QUESTION, "answer": ANSWER}] * 4
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[correct]))


def walk_rollout(walk: Walk, url: str) -> None:
    from verifiers.inference.server_pool import ServerPool
    from verifiers.rollouts.block import BatchRequest
    from verifiers.rollouts.generator import AsyncBatchGenerator
    from verifiers.rollouts.rollout import RolloutRequest
    from verifiers.types import RolloutKey

    walked = []
    with AsyncBatchGenerator(load_environment(), ServerPool([url]), "fake") as generator:
        for number in range(PLAYED_BEFORE + WALKED):
            request = RolloutRequest(RolloutKey(0, number, 0), QUESTION, ANSWER, seed=number + 1)
            if number >= PLAYED_BEFORE:
                walk.start()
            generator.submit_batch(BatchRequest(number, [request]))
            block = generator.get_batch(number)
            walk.stop()
            assert block.rollouts[0].reward == 1.0
            walked.append(walk.entries)
            walk.entries = []
    walk.entries = min(walked[PLAYED_BEFORE:], key=len)


def walk_block(walk: Walk, url: str) -> None:
    sys.path.append(str(Path(__file__).resolve().parent))
    from overlap import make_policy

    from verifiers.train.config import GRPOConfig
    from verifiers.train.trainer import GRPOTrainer

    class Arrived(Exception):
        pass

    class Walked(GRPOTrainer):
        def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            walk.stop()
            raise Arrived

    with tempfile.TemporaryDirectory() as scratch:
        make_policy(Path(scratch) / "policy")
        args = GRPOConfig(
            str(Path(scratch) / "run"),
            server_url=url,
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=32,
            probe_tolerance=1e9,
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            bf16=False,
        )
        trainer = Walked(str(Path(scratch) / "policy"), load_environment(), args)
        walk.start()
        with contextlib.suppress(Arrived):
            trainer.train()


def walk_evaluation(walk: Walk, url: str) -> None:
    from verifiers.cli.evaluate import main as evaluate

    command = [__file__, "-m", "fake", "-b", url, "-n", "1", "-r", "1", "--output-dir"]
    with tempfile.TemporaryDirectory() as scratch:
        # what is imported once belongs to none
        assert evaluate([*command, f"{scratch}/first"]) == 0
        walk.start()
        code = evaluate([*command, f"{scratch}/second"])
        walk.stop()
    assert code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-training", action="store_true", help="Leave out the block; needs no torch.")
    parser.add_argument("--trail", action="store_true", help="Print every entry; a star is a move.")
    args = parser.parse_args()
    walks = {}
    with contextlib.redirect_stdout(sys.stderr):
        walks["rollout"] = Walk()
        with server_process(ANSWER, "--instant") as url:
            walk_rollout(walks["rollout"], url)
        if not args.no_training:
            walks["block"] = Walk()
            with server_process(ANSWER) as url:
                walk_block(walks["block"], url)
        walks["evaluation"] = Walk()
        with server_process(ANSWER) as url:
            walk_evaluation(walks["evaluation"], url)
    for walk in walks.values() if args.trail else ():
        before = ""
        for file, name in walk.entries:
            print(f"{' ' if file == before else '*'} {file} {name}")
            before = file
    for name, walk in walks.items():
        print(f"one {name}: " + ", ".join(f"{count:,} {what}" for what, count in walk.counts().items()))
    counts = {f"{name}_{what}": count for name, walk in walks.items() for what, count in walk.counts().items()}
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
