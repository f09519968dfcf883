"""Monitoring of a run: where its time and memory go, what was sampled, and its record."""
