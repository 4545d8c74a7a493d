"""`python -m normkit_papers.cli` is `normkit`."""

import sys

from normkit_papers.cli import main

if __name__ == "__main__":
    sys.exit(main())
