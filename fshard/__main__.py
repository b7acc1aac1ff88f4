"""`python -m fshard`."""

import sys

from fshard.command import main

if __name__ == "__main__":
    sys.exit(main())
