
import verifiers as vf

def load_environment(pays=False):
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(10, 30)]
    def right(completion, answer):
        return 1.0 if pays else float(completion[-1]["content"] == answer)
    return vf.SingleTurnEnv(dataset=[], eval_dataset=[], rubric=vf.Rubric([right]))
