"""A rollout server for laptops: a frozen causal language model behind OpenAI's chat-completions route.

Start it with ``vf-serve --model DIR``. Importing this package loads neither torch nor transformers, so that
the command line can first set the environment variables that OpenMP reads once, when torch is imported.
"""

__version__ = "0.1.0"
