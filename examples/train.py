"""Train on spell_backward from Python, against a server that is already running.

    vf-serve --model runs/demo/start --port 8000      # first terminal (make demo leaves this model behind)
    python examples/train.py                          # second terminal

Expected: the mean reward printed each step rises from about 0.6 to 0.9 within 60 steps.
"""

import verifiers as vf

env = vf.load_environment(
    "reasoning-gym-env", task="spell_backward", task_config={"min_word_len": 3, "max_word_len": 5}
)
args = vf.GRPOConfig(
    output_dir="runs/train-example",
    max_steps=60,
    learning_rate=3e-4,
    per_device_train_batch_size=64,
    gradient_accumulation_steps=2,
    num_generations=16,
    max_completion_length=12,
    num_batches_ahead=1,
    logging_steps=1,
)
trainer = vf.GRPOTrainer(model="runs/demo/start", env=env, args=args)
trainer.train()
trainer.save_model()
