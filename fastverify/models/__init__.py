"""Target networks and their tokenizers: load_target(path), load_tokenizer(path). Loaders are imported on first use."""

__all__ = ["LoadError", "load_target", "load_tokenizer"]


def __getattr__(name: str):
    if name in __all__:
        from . import load
        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
