"""`python -m tests.torture`, which is `scripts/torture`."""

import sys

from tests.torture.command import main

# The workers of the command import their own module again, so it is not this one.
if __name__ == "__main__":
    sys.exit(main())
