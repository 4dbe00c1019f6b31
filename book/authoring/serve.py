"""A small web server for the built website, on this machine only."""
from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class QuietHandler(SimpleHTTPRequestHandler):
    """Serve files without logging each one, and make the browser check again after a rebuild."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that the address stays visible in the terminal."""

    def end_headers(self) -> None:
        """Make the browser check for a newer file each time."""
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()


def bind(folder: Path, port: int) -> ThreadingHTTPServer:
    """Open the server on 127.0.0.1 at `port`, or at any free port if that one is taken."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError:
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve `folder` at a free port while the block runs; yields the address without a trailing slash."""
    with bind(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def serve(folder: Path, port: int = 8000) -> int:
    """Serve `folder` until Ctrl-C (or SIGTERM); returns the exit status."""
    if not (folder / "index.html").is_file():
        print(f"There is no website in {folder}. Build it with 'make site'.")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with bind(folder, port) as server:
        print(f"\nThe book is at  http://127.0.0.1:{server.server_address[1]}/\nPress Ctrl-C to stop.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nStopped.", flush=True)
    return 0
