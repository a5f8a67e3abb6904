"""Imports DuckDB. A signal meanwhile waits: an exception inside its import ends the process."""

from __future__ import annotations

import signal
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_received: list[signal.Signals] = []
_handlers = {}
if threading.current_thread() is threading.main_thread():  # handlers run there
    _handlers = {number: signal.getsignal(number) for number in _SIGNALS}
try:
    for _number, _handler in _handlers.items():
        if callable(_handler):
            signal.signal(_number, lambda number, _frame: _received.append(signal.Signals(number)))
    import duckdb
finally:
    for _number, _handler in _handlers.items():
        if callable(_handler):
            signal.signal(_number, _handler)
    for _number in _received:
        signal.raise_signal(_number)

__all__ = ["duckdb"]
