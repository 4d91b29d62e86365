"""`python -m deft`: the same as the command `deft` (for `accelerate launch -m deft train …`)."""

import sys

from deft.cli import main

if __name__ == "__main__":
    sys.exit(main())
