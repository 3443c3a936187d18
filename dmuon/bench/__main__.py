"""``python -m dmuon.bench``."""

import sys

from dmuon.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
