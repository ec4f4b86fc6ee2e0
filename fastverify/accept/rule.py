"""Names of verify_tree's rules and flag bits (the numbers are csrc/common/types.h)."""

from enum import IntEnum, IntFlag


class Rule(IntEnum):
    """How a visited node's token is chosen."""

    GREEDY = 0        # argmax, whatever the temperature
    SAMPLE_MATCH = 1  # Gumbel-max with noise keyed by (seed, absolute position, id); temperature 0 is greedy


class Flag(IntFlag):
    """Bits of flags[b]; 0 = nothing special."""

    STOP = 1          # a stop id was emitted; what followed it was cut
    BUDGET = 2        # remaining[b] reached zero
    BAD_TREE = 4      # malformed tree: treated as its bare root (no rows: no token)
    BAD_TOKEN = 8     # a drafted id outside [0, vocab): never matched (build_tree: clamped)
    BAD_ROW = 16      # NaN or +inf in a visited row: the best finite entry was emitted, then stop
    EMPTY_ROW = 32    # no finite entry in a visited row: no token from it
    PATH_FULL = 64    # the path buffer ended before the walk did
    BAD_PARAM = 128   # a sampling parameter out of range was replaced
