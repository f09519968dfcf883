"""Seeing a run: where its time and memory go, what was sampled, and the page that tells of it."""
