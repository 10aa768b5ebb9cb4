"""``python -m pfx``, as torchrun starts it: the command line."""

import sys

from pfx.cli import main

if __name__ == "__main__":
    sys.exit(main())
