"""Shared by the tests of inspect and remap: variants of the golden draft (tests/data/golden), and the command line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastverify.cli.main import main

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
V, VD = 512, 480


def tensors() -> dict:
    return load_file(GOLDEN / "draft/model.safetensors")


def config() -> dict:
    return json.loads((GOLDEN / "draft/config.json").read_text())


def write(folder: Path, new: dict, raw: "dict | None" = None) -> Path:
    """A draft folder of these tensors; config: the golden one's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config() if raw is None else raw))
    save_file({k: v.contiguous() for k, v in new.items()}, folder / "model.safetensors")
    return folder


def ids_of(t: dict) -> torch.Tensor:
    return torch.arange(t["d2t"].numel()) + t["d2t"]


def with_map(t: dict, ids: torch.Tensor) -> dict:
    """The same draft whose map says `ids`: head rows are left where they are."""
    return t | {"d2t": ids - torch.arange(ids.numel()), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}


def other_ids(swap: int = 32) -> torch.Tensor:
    """Another target's map: sorted, every 14th golden id (`swap` of them) given up for ids that it does not have."""
    old = ids_of(tensors())
    missing = torch.tensor(sorted(set(range(V)) - set(old.tolist())))[:swap]
    kept = old[~torch.isin(old, old[5::14][:swap])]
    return torch.cat([kept, missing]).sort().values


@pytest.fixture
def command(capsys, monkeypatch):
    """command(*args) -> (exit code, stdout, stderr) of `fastverify ...`, in this process."""
    monkeypatch.delenv("FASTVERIFY_LOG", raising=False)

    def run(*args) -> tuple:
        capsys.readouterr()
        try:
            code = main([str(a) for a in args])
        except SystemExit as exc:
            code = exc.code
        return (code or 0, *capsys.readouterr())

    return run
