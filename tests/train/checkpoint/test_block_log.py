"""blocks.jsonl tells what became of every rollout, and after a resume the lineage of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifiers.errors import CheckpointError
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.training_block import Dropped
from verifiers.train.checkpoint.block_log import BLOCK_LOG, BlockLog, block_record, read_block_log
from verifiers.types import Outcome, RolloutKey, Timing


def a_block(block_id: int) -> ScoredBlock:
    """Three rollouts of two rows each, and a filtered group of one."""

    def rollout(example: int, generation: int) -> Rollout:
        rows = [TokenSequence([1], [2, 3], [1, 1], [-1.0, -1.0], [0, 0]) for _ in range(2)]
        timing = Timing(generation_s=generation + 0.5)
        return Rollout(
            RolloutKey(block_id, example, generation), Outcome.COMPLETED, "p", "", rows=rows, timing=timing
        )

    kept, filtered = Group(4, [rollout(4, g) for g in range(3)]), Group(9, [rollout(9, 0)])
    return ScoredBlock(block_id, [kept], filtered=[filtered])


def test_every_rollout_is_trained_or_dropped_and_one_that_lost_a_row_is_both() -> None:
    dropped = [
        Dropped(RolloutKey(0, 4, 0), "stale", tokens=6),
        Dropped(RolloutKey(0, 4, 1), "longer_than_max_seq_len", row=1, tokens=3),
        Dropped(RolloutKey(0, 4, 2), "longer_than_max_seq_len", row=0, tokens=3),
        Dropped(RolloutKey(0, 4, 2), "longer_than_max_seq_len", row=1, tokens=3),
        Dropped(RolloutKey(0, 9, 0), "zero_variance", tokens=6),
    ]
    record = block_record(a_block(0), 7, dropped)
    assert (record["block_id"], record["optimizer_step"], record["trained"]) == (0, 7, [[4, 1]])
    assert record["dropped"][0] == {
        "example_id": 4,
        "generation": 0,
        "reason": "stale",
        "row": None,
        "tokens": 6,
        "seconds": 0.5,
    }
    assert [(item["generation"], item["row"]) for item in record["dropped"]] == [
        (0, None),
        (1, 1),
        (2, 0),
        (2, 1),
        (0, None),
    ]


def test_a_resumed_run_takes_out_what_it_trains_again(tmp_path: Path) -> None:
    first = BlockLog(tmp_path, 0)
    for number in range(4):
        first.write(block_record(a_block(number), number, []))
    with open(tmp_path / BLOCK_LOG, "a") as file:
        file.write('{"block_id": 4, "opt')
    second = BlockLog(tmp_path, 2)
    assert [record["block_id"] for record in read_block_log(tmp_path)] == [0, 1]
    second.write(block_record(a_block(2), 2, []))
    second.sync()
    assert [record["block_id"] for record in read_block_log(tmp_path)] == [0, 1, 2]


def test_a_line_holds_ranges_and_exceptions_and_is_read_as_every_rollout(tmp_path: Path) -> None:
    groups = [
        Group(17 * example, [Rollout(RolloutKey(0, 17 * example, g), Outcome.COMPLETED, "p", "") for g in range(16)])
        for example in range(16)
    ]
    for group in groups[:8]:
        for one in group.rollouts:
            one.rows = [TokenSequence([1], [2], [1], [-1.0], [0])]
    dropped = [Dropped(one.key, "zero_advantage", tokens=9) for group in groups[8:] for one in group.rollouts]
    dropped += [
        Dropped(RolloutKey(0, 17, 3), "timed_out", tokens=2),
        Dropped(RolloutKey(0, 34, 0), "stale", tokens=2),
    ]
    record = block_record(ScoredBlock(0, groups), 5, dropped)
    log = BlockLog(tmp_path, 0)
    log.write(record)
    assert log.path.stat().st_size < 1000, "256 rollouts took 24 kB a line when each had an entry"
    # a resumed run reads and writes the lines that it keeps
    BlockLog(tmp_path, 1)
    (read,) = read_block_log(tmp_path)
    assert read["trained"] == record["trained"]
    assert len(read["trained"]) == 8 * 16 - 2
    assert read["dropped"][:2] == record["dropped"][-2:]
    told = [(item["example_id"], item["generation"], item["reason"]) for item in record["dropped"]]
    assert sorted((item["example_id"], item["generation"], item["reason"]) for item in read["dropped"]) == sorted(
        told
    )


def test_a_fresh_run_starts_a_block_log_of_its_own(tmp_path: Path) -> None:
    BlockLog(tmp_path / "run", 0).write(block_record(a_block(0), 0, []))
    BlockLog(tmp_path / "run", 0)
    assert read_block_log(tmp_path / "run") == []
    assert read_block_log(tmp_path / "elsewhere") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_line_that_cannot_be_written_ends_the_run_and_says_of_which_block(tmp_path: Path) -> None:
    log = BlockLog(tmp_path, 0)
    log.path.unlink()
    log.path.symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"the record of block 3 could not be written .*No space left"):
        log.write(block_record(a_block(3), 3, []))


def test_a_block_log_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written .*give another output_dir"):
        BlockLog(tmp_path / "file" / "run", 0)
