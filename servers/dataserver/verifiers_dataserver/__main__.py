"""``python -m verifiers_dataserver`` is ``vf-dataserver``."""

import sys

from verifiers_dataserver.cli import main

if __name__ == "__main__":
    sys.exit(main())
