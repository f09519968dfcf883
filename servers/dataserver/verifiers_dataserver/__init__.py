"""A server of prompts and grades: trainers get rows of a curriculum and rewards, and never see answers.

`vf-dataserver config.yaml` runs it; docs/guides/dataserver.md has the file's keys and the routes.
"""

__version__ = "0.1.0"
