"""The recording gateway: an HTTP face of the rollout client, for agents that own their loop."""
