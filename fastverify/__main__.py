"""python -m fastverify: the same as the `fastverify` command."""

import sys

from .cli.main import main

sys.exit(main())
