"""A package as authors of the second generation (0.1.8 - 0.1.14) wrote them: marks, trajectory, message objects."""

import json

import verifiers as vf
from verifiers.types import RolloutInput, State, TrajectoryStep


class UnitQuizEnv(vf.MultiTurnEnv):
    """Asks for a conversion, then asks whether the policy is sure; a wrong first answer earns a second try."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.open_rollouts = 0
        self.teardowns = 0

    async def init_state(self, input: RolloutInput, client, model, sampling_args=None) -> State:  # noqa: A002
        state = await super().init_state(input, client, model, sampling_args)
        state["tries"] = 0
        return state

    async def setup_state(self, state: State) -> State:
        self.open_rollouts += 1
        state["unit"] = state["info"]["unit"]
        state["prompt"] = [*state["prompt"], vf.UserMessage(content=f"Answer in {state['unit']}.")]
        return state

    async def get_model_response(self, state: State, prompt, **kwargs):
        state["asked"] = [*state.get("asked", []), len(prompt)]
        return await super().get_model_response(state, prompt, **kwargs)

    async def add_trajectory_step(self, state: State, trajectory_step: TrajectoryStep):
        trajectory_step["reward"] = float(state["answer"] in (trajectory_step["completion"][-1].content or ""))
        await super().add_trajectory_step(state, trajectory_step)

    async def env_response(self, messages: vf.Messages, state: State, **kwargs) -> vf.Messages:
        state["tries"] += 1
        if messages[-1].role != "assistant":
            raise vf.InfraError("the policy did not speak last")
        if "give up" in messages[-1].content:
            state["final_env_response"] = [vf.UserMessage(content="Very well.")]
            return state["final_env_response"]
        if "crash" in messages[-1].content:
            raise vf.SandboxError("the scales broke")
        return [vf.UserMessage(content="Are you sure?")]

    @vf.stop(priority=10)
    async def answered_right(self, state: State) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["reward"] == 1.0

    @vf.cleanup
    async def leave(self, state: State):
        self.open_rollouts -= 1

    @vf.teardown
    async def put_away(self):
        self.teardowns += 1


def load_environment(max_turns: int = 3) -> vf.Environment:
    rows = [
        {"question": "How long is a mile?", "answer": "1609", "info": json.dumps({"unit": "metres"})},
        {"question": "How heavy is a pound?", "answer": "454", "info": json.dumps({"unit": "grams"})},
    ]

    async def right(completion, answer, parser) -> float:
        said = parser.get_assistant_messages(completion)
        return float(bool(said) and answer in said[-1].content)

    async def best_step(state: State) -> float:
        return max((step["reward"] for step in state["trajectory"]), default=0.0)

    rubric = vf.Rubric(funcs=[right], weights=[1.0])
    rubric.add_metric(best_step)
    return UnitQuizEnv(max_turns=max_turns, dataset=as_dataset(rows), eval_dataset=as_dataset(rows), rubric=rubric)


def as_dataset(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)
