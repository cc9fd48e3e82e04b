"""What the process of a client runs: `python -m fedbilevel.engine.serve DESCRIPTOR [PROGRAM]`.

A module of its own, which nothing imports: Python would warn of one that it has imported before it runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from fedbilevel.engine.worker import Worker


def main(make: Callable[..., Worker] = Worker) -> None:
    """Serve the server at the other end of an inherited socket until it hangs up.

    The command line names the socket's descriptor and how the user's program was started, if it was.
    """
    descriptor, *script = sys.argv[1:]
    worker = make(script)
    with Connection(int(descriptor)) as server:
        try:
            while True:
                server.send_bytes(worker.answer(server.recv_bytes()))
        except (EOFError, ConnectionError, KeyboardInterrupt):
            return


if __name__ == "__main__":
    main()
