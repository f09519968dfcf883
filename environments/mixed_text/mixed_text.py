"""Two environments as one: each row is played and scored by the package that it came from."""

from __future__ import annotations

import verifiers as vf

__all__ = ["load_environment"]

NAMES = ["reverse-text", "sentence-repeater"]


def load_environment(num_train: int = 400, num_eval: int = 50, seed: int = 0) -> vf.Environment:
    """Build the environment; each row's `task` is the name of the package it came from.

    Args:
        num_train: training rows of each package.
        num_eval: evaluation rows of each package; none of them is a training row.
        seed: chooses the rows.

    Raises:
        vf.ConfigError: more rows than a package has.
    """
    envs = [vf.load_environment(name, num_train=num_train, num_eval=num_eval, seed=seed) for name in NAMES]
    return vf.EnvGroup(envs, env_names=NAMES)
