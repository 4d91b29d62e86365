"""`python -m deft`: the same as the command `deft` (for `accelerate launch -m deft train …`)."""

import os
import sys

import deft

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # where `python -m` puts the current directory: a yaml.py in it would shadow PyYAML
    if (source := os.path.dirname(os.path.dirname(deft.__file__))) not in sys.path:
        sys.path.append(source)  # for worker processes, where Deft is not installed

from deft.cli import main

if __name__ == "__main__":
    sys.exit(main())
