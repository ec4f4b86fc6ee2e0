"""Runs the command line: in this process, as a process with pipes, or on a pseudo-terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"
PAIR = ["--target", str(GOLDEN / "target"), "--draft", str(GOLDEN / "draft")]
IDS = ["--token-ids", "3,4,5"]
COMMAND = [sys.executable, "-m", "fastverify"]


def environment(**more: str) -> dict:
    """This process's, with the package importable from any folder, and no colour or cache settings of the user's."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FASTVERIFY_") and k not in ("NO_COLOR", "FORCE_COLOR")}
    return env | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TERM": "xterm-256color", "COLUMNS": "100"} | more


def piped(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, text=True, env=environment(**env), timeout=120)


def heed_interrupts() -> None:
    """In a child before exec: a test run started in the background hands down an ignored SIGINT, which Python keeps."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command on a pseudo-terminal that is its stdin, stdout and stderr, and its controlling terminal."""

    def __init__(self, *args: str, **env: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            heed_interrupts()
            os.execve(sys.executable, [*COMMAND, *args], environment(**env))
        self.seen, self.code = b"", None

    def read(self, until: "bytes | None" = None, seconds: float = 120) -> str:
        """Everything shown so far, reading until the pattern `until` appears (default: until the command ends)."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until and re.search(until, self.seen)):
            if not select.select([self.fd], [], [], 0.1)[0]:
                continue
            try:
                piece = os.read(self.fd, 65536)
            except OSError:  # EIO: the other side is closed
                piece = b""
            if not piece:
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                break
            self.seen += piece
        return self.seen.decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)
