"""``python -m verifiers_embedded`` is ``vf-serve``."""

import sys

from verifiers_embedded.cli import main

if __name__ == "__main__":
    sys.exit(main())
