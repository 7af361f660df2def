"""`python -m tests.fuzz`, which is `scripts/fuzz`."""

import sys

from tests.fuzz.command import main

# The processes of the command import their own module again, so it is not this one.
if __name__ == "__main__":
    sys.exit(main())
