"""A port for processes that meet: outside of the range from which the system serves others, so that nobody takes it in between."""

import random
import socket


def free_port() -> int:
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(20000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
