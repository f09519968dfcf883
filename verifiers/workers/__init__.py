"""Rollouts on every core and every host: environments in worker processes, which reach the model through rank 0."""
