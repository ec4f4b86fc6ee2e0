"""Profiler traces of all ranks: where the communication time of a step goes. No torch, no GPU."""

from .account import Account, Report, account
from .events import RankTrace, read_rank

__all__ = ["Account", "RankTrace", "Report", "account", "read_rank"]
