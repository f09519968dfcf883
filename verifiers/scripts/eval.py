"""Classic import path of `verifiers.cli.evaluate`."""

import sys

from verifiers.cli.evaluate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
