"""L2: the stacks of threads as `faulthandler` writes them: of this process now, or of one that has crashed.

No frame object of a thread that runs may be touched from another thread: CPython 3.11.7 was seen to follow `f_back`
into memory that was no longer a frame's, and to crash. faulthandler makes no frame objects.
"""
from __future__ import annotations

import faulthandler
import io
import keyword
import linecache
import os
import re
import tempfile
import tokenize
from typing import BinaryIO, NamedTuple

# What was printed before on the same line may have had no end.
_HEAD = re.compile(r"(Current thread|Thread|Stack)(?: 0x([0-9a-f]+))?(?: \[.*\])? \(most recent call first\):$")
_LINE = re.compile(r' +File "([^"]+)", line (\d+) in (.+)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_CALL = re.compile(r"(\w+)\s*\(")


class Line(NamedTuple):
    """The line of source that a function is at."""
    filename: str
    number: int
    function: str

    @property
    def source(self) -> str:
        """What it says, without the spaces around; "" where that is not known."""
        return linecache.getline(self.filename, self.number).strip()

    def calls(self) -> set[str]:
        """The names of what is called there: {"isend", "wait"} for `dist.isend(x, 1).wait()`."""
        names, before = set(), ""
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
                if token.type == tokenize.STRING and "f" in token.string.partition(token.string[-1])[0].lower():
                    names.update(_CALL.findall(token.string))  # before Python 3.12 it is one token
                if token.string == "(" and before.isidentifier() and not keyword.iskeyword(before):
                    names.add(before)
                before = token.string
        except (tokenize.TokenError, SyntaxError):
            pass  # the statement goes on in the next line
        return names


class Stack(NamedTuple):
    """The lines of one thread, from the outermost call inwards; `ident` is 0 where faulthandler names no thread."""
    ident: int
    is_current: bool
    lines: tuple[Line, ...]


def of_threads() -> dict[int, tuple[Line, ...]]:
    """The lines of the 100 newest threads that run Python, by `threading.get_ident()`."""
    with _file_in_memory() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    return {stack.ident: stack.lines for stack in read(text)}


def _file_in_memory() -> BinaryIO:
    """An empty file; on disk where Python was built without memory files."""
    return os.fdopen(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def of_crash(text: str) -> tuple[Line, ...]:
    """The lines of the thread that crashed or was asked, in what a rank has printed; else those of the main thread."""
    stacks = read(text)
    blamed = next((stack for stack in stacks if stack.is_current), stacks[-1] if stacks else None)
    return blamed.lines if blamed else ()


def read(text: str) -> list[Stack]:
    """The stacks in a text, among whatever else was printed; the main thread's is the last one."""
    stacks: list[Stack] = []
    lines: list[Line] | None = None
    for row in text.splitlines():
        head, line = _HEAD.search(row), _LINE.fullmatch(row)
        if head:
            lines = []
            stacks.append((int(head[2] or "0", 16), head[1] != "Thread", lines))
        elif line and lines is not None:
            lines.append(Line(_unescaped(line[1]), int(line[2]), line[3]))
    return [Stack(ident, is_current, tuple(lines[::-1])) for ident, is_current, lines in stacks if lines]


def _unescaped(name: str) -> str:
    """A name as it is: faulthandler writes what is not ASCII as escapes."""
    return _ESCAPE.sub(lambda escape: chr(int("".join(filter(None, escape.groups())), 16)), name)
