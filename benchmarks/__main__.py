"""python -m benchmarks: the same as `fastverify bench`, from the root of a clone."""

import sys

from fastverify.cli.main import main

sys.exit(main(["bench", *sys.argv[1:]]))
