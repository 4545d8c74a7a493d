"""`python -m normkit.cli` is `normkit`."""

import sys

from normkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
