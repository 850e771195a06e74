"""`python -m plait.cli`, where the `plait` script is not on the path."""

import sys

from plait.cli import main

if __name__ == "__main__":
    sys.exit(main())
