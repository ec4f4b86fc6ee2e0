"""python -m fastverify.doctor: the report, when the `fastverify` command itself does not start."""

import sys

from .report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
