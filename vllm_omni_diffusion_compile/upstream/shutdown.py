"""Whether the server was told to stop while it starts."""

from __future__ import annotations

import signal


def told_to_stop() -> bool:
    """Whether SIGINT has come to a server that asyncio runs in this process.

    asyncio marks its main task as cancelled at the first SIGINT and interrupts nothing: a server that is starting stops
    when it has started. What we add to the start looks here, so that it does not make the user wait.

    Source: `asyncio.Runner._on_sigint`, Python 3.11 to 3.13. On 3.10 the first SIGINT interrupts at once.
    """
    main_task = getattr(signal.getsignal(signal.SIGINT), "keywords", {}).get("main_task")
    return bool(main_task is not None and main_task.cancelling())
