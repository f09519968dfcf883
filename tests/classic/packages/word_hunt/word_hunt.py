"""A package as authors of the first generation (0.1.0 - 0.1.7) wrote them: is_completed, tuples, responses, turn."""

from typing import Tuple  # noqa: UP035

from datasets import Dataset

import verifiers as vf
from verifiers.types import Messages, State

SYSTEM_PROMPT = "Find the hidden word. Write <think>...</think> and then <guess>...</guess>."


class WordHuntEnv(vf.MultiTurnEnv):
    def __init__(self, max_guesses: int = 4, **kwargs):
        super().__init__(**kwargs)
        self.max_guesses = max_guesses

    def setup_state(self, state: State, **kwargs) -> State:
        state["guesses"] = []
        return state

    async def is_completed(self, messages: Messages, state: State, **kwargs) -> bool:
        if state["guesses"] and state["guesses"][-1] == state["answer"]:
            return True
        return state["turn"] >= self.max_guesses

    def env_response(self, messages: Messages, state: State, **kwargs) -> Tuple[Messages, State]:  # noqa: UP006
        guess = self.parser.parse(messages[-1]["content"]).guess
        state["guesses"].append(guess)
        if guess == state["answer"]:
            return [{"role": "user", "content": "Found it."}], state
        shared = len(set(guess or "") & set(state["answer"]))
        return [{"role": "user", "content": f"{shared} letters in common."}], state


def load_environment(max_guesses: int = 4, words: str = "lamp,tree", **kwargs) -> vf.Environment:
    rows = [{"question": f"The word has {len(word)} letters.", "answer": word} for word in words.split(",")]
    parser = vf.XMLParser(["think", "guess"], answer_field="guess")

    def found(parser, completion, answer, **kwargs) -> float:
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    def quickness(completion, state) -> float:
        return 1.0 / max(1, len(state["responses"]))

    rubric = vf.Rubric(parser=parser)
    rubric.add_reward_func(found)
    rubric.add_reward_func(quickness, weight=0.5)
    rubric.add_reward_func(parser.get_format_reward_func(), weight=0.0)
    return WordHuntEnv(
        max_guesses=max_guesses,
        dataset=Dataset.from_list(rows),
        system_prompt=SYSTEM_PROMPT,
        parser=parser,
        rubric=rubric,
        **kwargs,
    )
