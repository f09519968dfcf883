"""What runs in the processes of a sandbox: standard library alone, one thread, no import of the rest at start."""
