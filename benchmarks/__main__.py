"""python -m benchmarks: the same as `fastverify bench`, from the root of a clone."""

import sys
from pathlib import Path

root = Path(__file__).resolve().parents[1]
if not list((root / "fastverify").glob("_C*.so")):  # a source tree that was not built: an installed fastverify goes first
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != root]

from fastverify.cli.main import main  # noqa: E402

sys.exit(main(["bench", *sys.argv[1:]]))
