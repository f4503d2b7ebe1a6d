"""What a process prints, read as it comes. Owns the last of it."""

import os
import threading

TAIL_BYTES = 8 * 1024


class Output:
    """The last of what a rank printed, read as it comes so that the rank never waits. Safe to use from two threads."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._tail = bytearray()
        self._lock = threading.Lock()
        self._open = True

    def fileno(self) -> int:
        """The pipe's descriptor, for polling."""
        return self._fd

    def drain(self) -> bool:
        """Read what is there. False when nothing more will come."""
        with self._lock:
            for _ in range(16):  # a rank that prints without end must not hold the reader here
                try:
                    chunk = os.read(self._fd, 1 << 16) if self._open else b""
                except BlockingIOError:
                    return True
                if not chunk:
                    return False
                self._tail += chunk
                del self._tail[:-TAIL_BYTES]
            return True

    def text(self) -> str:
        """At most the last 8 KiB."""
        with self._lock:
            return self._tail.decode("utf-8", errors="replace").strip()

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._fd)
