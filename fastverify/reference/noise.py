"""Philox-4x32-7 and the Gumbel noise of vocabulary ids, written independently of the C++ header (numpy, float64)."""

import numpy as np

ROUNDS = 7
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter, key, rounds: int = ROUNDS):
    """counter: four uint32 arrays (or ints), key: two ints -> four uint64 arrays holding uint32 words."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in np.broadcast_arrays(*counter))
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(rounds):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), p1 & _LOW,
                          (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), p0 & _LOW)
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(ids, position: int, seed: int):
    """float64 noise -log(-log1p(-x)), x = (r + 1/2) 2^-32, of vocabulary ids at an absolute position."""
    ids = np.asarray(ids, dtype=np.uint64)
    seed &= 2**64 - 1
    words = philox4x32((ids >> np.uint64(2), position & 0xFFFFFFFF, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    r = np.choose((ids & np.uint64(3)).astype(np.int64), words)
    return -np.log(-np.log1p(-(r.astype(np.float64) + 0.5) * 2.0**-32))
