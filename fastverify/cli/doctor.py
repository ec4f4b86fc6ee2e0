"""fastverify doctor: the install and the machine, what is wrong, what to do."""

import argparse

from ..doctor import report


def add_parser(commands) -> argparse.ArgumentParser:
    text = ("GPUs and their wiring, driver, torch, the compiled libraries, architectures per GPU, NCCL: what was found, what is wrong, "
            "what to do. Exit code 1 if something does not work. `python -m fastverify.doctor` is the same.")
    parser = commands.add_parser("doctor", help="what is installed, what is wrong, what to do", description=text)
    report.add_arguments(parser)
    return parser


run = report.run
