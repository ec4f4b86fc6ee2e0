"""fastverify: the verify step of speculative decoding as fused torch ops. Importing it touches no CUDA."""

from ._version import __version__

__all__ = ["__version__"]
