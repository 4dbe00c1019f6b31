"""L4: a kernel or a rank begins here: python -m book.grading.alone MODULE ARGUMENT… runs a module.

It first joins a session keyring of its own. The kernel's keyrings are in no namespace: two submissions could leave each
other notes in the one that the grader was started with, and read keys that are there.
"""
from __future__ import annotations

import ctypes
import platform
import runpy
import sys

_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1  # numbers of Linux's system call


def main() -> None:
    """Joins a keyring of its own, as far as this machine's call is known, and runs the module that is named."""
    number = _KEYCTL.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, _JOIN_SESSION_KEYRING, None)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
