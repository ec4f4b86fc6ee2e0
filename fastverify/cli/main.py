"""`fastverify`: the console entry point. One file per subcommand; each has add_parser and run."""

import os
import sys
import traceback
import warnings

from .._version import __version__
from . import bench, check, doctor, evaluate, fetch_demo, generate, inspect, plan, probe, remap, trace, train
from .options import Parser

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPT, EXIT_PIPE = 1, 2, 130, 141


def build_parser() -> Parser:
    parser = Parser(prog="fastverify", description="The verify step of speculative decoding as fused torch ops, and an "
                    "EAGLE-3 loop that proves them.")
    parser.add_argument("--version", action="version", version=f"fastverify {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (generate, fetch_demo, check, doctor, evaluate, inspect, remap, train, probe, plan, trace, bench):
        command.add_parser(commands).set_defaults(run=command.run)
    return parser


def main(argv: "list | None" = None) -> int:
    """Runs one command; returns its exit code: 0, 1 (failed), 2 (wrong input, one line on stderr), 130 (Ctrl-C)."""
    # Before torch is loaded: threads that spin between two products make a shared machine many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *rest, **kw: _say(f"warning: {message}")
            args = build_parser().parse_args(argv)
            return args.run(args)
    except KeyboardInterrupt as exc:
        if sys.stdout.isatty() and not str(exc):
            print(flush=True)  # the terminal shows ^C in the middle of the line
        _say(str(exc) or "interrupted")
        return EXIT_INTERRUPT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the flush at exit is silent
        return EXIT_PIPE
    except ModuleNotFoundError as exc:
        _debug()
        _say(f"the package {exc.name} must be installed for this; got none. Fix: pip install {(exc.name or '').split('.')[0]} "
             "(fastverify doctor lists all that is missing).")
        return EXIT_USAGE
    except ImportError as exc:
        _debug()
        _say(f"the libraries must load for this; got {exc}. Fix: fastverify doctor says what to do.")
        return EXIT_USAGE
    except (ValueError, RuntimeError, OSError, MemoryError) as exc:
        _debug()
        if isinstance(exc, OSError) and exc.filename is not None and exc.strerror:
            _say(f"{exc.filename} must be a path that can be used here; got: {exc.strerror}. Fix: name another, or mend that one.")
        else:
            _say(str(exc) or type(exc).__name__)
        return EXIT_USAGE
    except Exception as exc:
        _debug()
        _say(f"unexpected {type(exc).__name__}: {exc}. Fix: report it with the output under FASTVERIFY_LOG=debug.")
        return EXIT_FAILED


def _say(message: str) -> None:
    text = " ".join(message.split())
    print(text if text.startswith("fastverify") else f"fastverify: {text}", file=sys.stderr, flush=True)


def _debug() -> None:
    if os.environ.get("FASTVERIFY_LOG", "").lower() == "debug":
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
