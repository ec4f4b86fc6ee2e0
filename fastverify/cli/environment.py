"""Device, versions, date and command of a measurement: without them a number is not a number."""

import datetime
import platform
import re
import shlex
import sys
from pathlib import Path

import torch

from .._version import __version__


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model and how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return model[1].strip() if model else platform.processor() or platform.machine()


def command() -> str:
    """What was typed: `fastverify ...`, or `python SCRIPT ...`."""
    script = Path(sys.argv[0])
    typed = ["fastverify"] if script.stem in ("fastverify", "__main__") or script.suffix != ".py" else ["python", script.name]
    return shlex.join([*typed, *sys.argv[1:]])


def environment(device: torch.device, dtype: torch.dtype) -> dict:
    return dict(fastverify=__version__, torch=torch.__version__, python=platform.python_version(), device=device_name(device),
                device_type=device.type, threads=torch.get_num_threads(), dtype=str(dtype).removeprefix("torch."),
                date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                command=command())
