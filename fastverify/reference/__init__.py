"""The oracle: plain PyTorch in float64, one function per op, the op's own positional signature."""

from .common import probe

__all__ = ["probe"]

for _name in ("tree", "attention", "comm", "accept", "kv", "linear", "sglang"):
    try:
        _module = __import__(f"{__name__}.{_name}", fromlist=["__all__"])
    except ModuleNotFoundError as exc:
        if exc.name != f"{__name__}.{_name}":
            raise
        continue
    for _fn in _module.__all__:
        globals()[_fn] = getattr(_module, _fn)
        __all__.append(_fn)
