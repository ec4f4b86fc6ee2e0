"""Fixtures shared by all tests: back ends, seeds, and a runner that calls any op by keyword on any back end."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

import fastverify.reference as reference
from fastverify import _ops, _triton

# The CUDA sources on the CPU, if tests/emulator/build.sh has been run: their logic, not their speed or races.
EMULATED = Path(os.environ.get("FASTVERIFY_EMULATED",
                               Path(__file__).resolve().parent.parent / "build/emulator/fastverify_emulated.so"))
if EMULATED.exists():
    torch.ops.load_library(str(EMULATED))

# Triton's kernels: on the GPU, or under TRITON_INTERPRET=1 on CPU tensors (slow; wrong for bfloat16 and float8: skipped).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = _triton.installed() and (INTERPRETED or torch.cuda.is_available())

BACKENDS = (["cpu"] + (["cuda"] if torch.cuda.is_available() else []) + (["emulated"] if EMULATED.exists() else [])
            + (["triton"] if TRITON else []))


def _mend_interpreter() -> None:
    """numpy >= 2.4 refuses int(array of one element), which Triton 3.6's interpreter does for range(tensor)."""
    from triton.runtime import interpreter
    patch = interpreter._patch_lang_tensor

    def mended(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = mended


if TRITON and INTERPRETED:
    _mend_interpreter()

NOT_INTERPRETED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


# A kernel with blocks of hundreds of threads takes seconds per case on the emulator: of these files every n-th emulated
# case runs, unless FASTVERIFY_EMULATED_ALL=1. On a GPU all of them run.
EMULATED_SHARE = {"test_verify_tree.py": 5, "test_verify_tree_partials.py": 6, "test_lm_head_verify_tree.py": 4,
                  "test_tree_attention.py": 4, "test_tree_attention_tiles.py": 3}


def thin_out(config, items):
    """Deselects most emulated cases of the slow files; which ones stay does not change from run to run."""
    if os.environ.get("FASTVERIFY_EMULATED_ALL") == "1":
        return
    seen, dropped = {}, []
    for item in list(items):
        share = EMULATED_SHARE.get(item.path.name)
        call = getattr(item, "callspec", None)
        if share and call and call.params.get("backend") == "emulated" and len(items) > 1:
            n = seen[item.path.name] = seen.get(item.path.name, -1) + 1
            if n % share:
                dropped.append(item)
    if dropped:
        gone = set(map(id, dropped))
        items[:] = [i for i in items if id(i) not in gone]
        config.hook.pytest_deselected(items=dropped)


def pytest_collection_modifyitems(config, items):
    thin_out(config, items)
    for item in items:
        for mark, need in (("gpu", 1), ("gpu2", 2)):
            if item.get_closest_marker(mark) and torch.cuda.device_count() < need:
                item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA GPU(s), found {torch.cuda.device_count()}"))


def pytest_terminal_summary(terminalreporter):
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "CUDA GPU" in str(r.longrepr)]
    passed = len(terminalreporter.stats.get("passed", []))
    terminalreporter.write_line(f"verified here on {' and '.join(BACKENDS)}: {passed}; GPU-only, not run: {len(skipped)}")


def schema(op: str):
    """Argument list of torch.ops.fastverify.<op>."""
    return _ops.get(op)._schema.arguments


def mutable_names(op: str) -> list:
    return [a.name for a in schema(op) if a.alias_info is not None and a.alias_info.is_write]


def need_kernel(backend: str, op: str) -> None:
    """Skips, in words, when this build has no kernel of `op` for the back end."""
    if backend == "triton" and not _triton.exists(op):
        pytest.skip(f"{op} has no Triton version")
    if backend == "cuda" and not _ops.has_native_kernel(op, "cuda"):
        pytest.skip(f"{op} has no CUDA kernel in this build")
    if backend == "emulated" and not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastverify_emulated::{op}", "CPU"):
        pytest.skip(f"{op} has no CUDA source yet")


def interpreted(backend: str) -> bool:
    """Whether the back end runs in Triton's interpreter: some hundred times slower, so that tests take fewer cases."""
    return backend == "triton" and INTERPRETED


def device_of(backend: str) -> str:
    return "cuda" if backend == "cuda" or (backend == "triton" and not INTERPRETED) else "cpu"


def implementation(backend: str, op: str):
    """The callable of `op` on a back end, with the schema's positional arguments."""
    return (getattr(reference, op) if backend == "reference" else
            getattr(torch.ops.fastverify_emulated, op).default if backend == "emulated" else
            _triton.function(op) if backend == "triton" else _ops.get(op))


def run_op(backend: str, op: str, **kwargs) -> dict:
    """Calls `op` on "reference", "cpu", "cuda", "emulated" or "triton" with clones of the mutable arguments.

    Returns {name: tensor on the CPU} of every mutable argument that was given (a list of tensors: {name: list}). Missing
    keywords are passed as None, or as their default.
    """
    return {k: [t.cpu() for t in v] if isinstance(v, list) else v.cpu() for k, v in run_op_there(backend, op, **kwargs).items()}


def run_op_there(backend: str, op: str, **kwargs) -> dict:
    """run_op whose results stay where the op ran."""
    unknown = set(kwargs) - {a.name for a in schema(op)}
    assert not unknown, f"{op} has no argument {unknown}"
    need_kernel(backend, op)
    device = device_of(backend)
    mutable, outputs, args = set(mutable_names(op)), {}, []
    for a in schema(op):
        value = kwargs.get(a.name, a.default_value if a.has_default_value() else None)
        for t in value if isinstance(value, list) else [value]:
            if isinstance(t, torch.Tensor) and backend == "triton" and INTERPRETED and t.dtype in NOT_INTERPRETED:
                pytest.skip(f"Triton's interpreter is wrong for {t.dtype}")
        if isinstance(value, (torch.Tensor, list)):
            move = lambda t: t.to(device).clone(memory_format=torch.preserve_format) if a.name in mutable else t.to(device)  # noqa: B023, E731
            value = [move(t) for t in value] if isinstance(value, list) else move(value)
            if a.name in mutable:
                outputs[a.name] = value
        args.append(value)
    implementation(backend, op)(*args)
    return outputs


def positional(op: str, **kwargs) -> tuple:
    """Keyword arguments -> the positional tuple opcheck wants."""
    return tuple(kwargs.get(a.name, a.default_value if a.has_default_value() else None) for a in schema(op))


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def rng():
    """A fresh generator per test: inputs are random, failures reproducible through FASTVERIFY_TEST_SEED."""
    seed = int(os.environ.get("FASTVERIFY_TEST_SEED", "0"))
    return torch.Generator().manual_seed(seed)
