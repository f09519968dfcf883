"""Running code that nobody has read: sandboxes in tiers, and warm worker processes.

`verifiers.sandbox.opening.open_sandbox` opens one, `verifiers.sandbox.workers.WorkerPool` calls functions in them.
"""
