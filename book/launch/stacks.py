"""L2: the stacks of threads: of this process now, or of a crashed one from what `faulthandler` has written.

Two ways to read the stacks of threads that run have crashed CPython 3.11.7. `faulthandler.dump_traceback` goes through
all threads while one that C++ has started may be half entered in their list. A loop in Python that follows `f_back`
can lose the GIL on its way, and the frame after it may be gone. `of_threads` therefore asks `sys._current_frames`,
which takes the list's lock, and follows all frames in one call of C, during which no other thread runs Python.
"""
from __future__ import annotations

import functools
import gc
import io
import keyword
import linecache
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import accumulate, chain, islice, repeat, takewhile, tee
from operator import attrgetter
from typing import NamedTuple

# What was printed before on the same line may have had no end.
_HEAD = re.compile(r"(Current thread|Thread|Stack)(?: 0x([0-9a-f]+))?(?: \[.*\])? \(most recent call first\):$")
_LINE = re.compile(r' +File "([^"]+)", line (\d+) in (.+)')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_CALL = re.compile(r"(\w+)\s*\(")
_WHERE = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


class StackLine(NamedTuple):
    """The line of source that a function is at."""
    filename: str
    number: int
    function: str

    @property
    def source(self) -> str:
        """Its text without surrounding spaces; "" if that is not known."""
        return linecache.getline(self.filename, self.number).strip()

    def calls(self) -> frozenset[str]:
        """The names of what is called there: {"isend", "wait"} for `dist.isend(x, 1).wait()`."""
        return _calls_in(self.source)


@functools.lru_cache(1024)  # a rank that waits is looked at many times, and stands at the same lines
def _calls_in(source: str) -> frozenset[str]:
    names, before = set(), ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.STRING and "f" in token.string.partition(token.string[-1])[0].lower():
                names.update(_CALL.findall(token.string))  # before Python 3.12 it is one token
            if token.string == "(" and before.isidentifier() and not keyword.iskeyword(before):
                names.add(before)
            before = token.string
    except (tokenize.TokenError, SyntaxError):
        pass  # the statement goes on in the next line
    return frozenset(names)


class Stack(NamedTuple):
    """The lines of one thread, from the outermost call inwards; `ident` is 0 where faulthandler names no thread."""
    ident: int
    is_current: bool
    lines: tuple[StackLine, ...]


def of_threads() -> dict[int, tuple[StackLine, ...]]:
    """The lines of every thread that runs Python, by `threading.get_ident()`."""
    collects = gc.isenabled()
    gc.disable()  # before Python 3.12 any allocation may start a collection, and that runs Python
    try:
        # A name for the iterator would close a cycle with this function's own frame, which it finds too. All frames
        # that it has seen would then keep their variables, such as gradients, until the next collection.
        found = list(_stacks())
    finally:
        if collects:
            gc.enable()
    return {ident: tuple(StackLine(file, number or 0, name) for file, number, name in lines[::-1])
            for ident, lines in found}  # code that was made, not written, may have no line


def _stacks() -> Iterator[tuple[int, tuple[tuple[str, int | None, str], ...]]]:
    """Each thread and its (file, line, function)s from the innermost out; nothing is read before `list` asks.

    There is no lambda and no generator in it: between two of their bytecodes another thread could run.
    """
    idents, frames = tee(islice(iter(sys._current_frames, None), 1))
    outwards = map(chain, zip(chain.from_iterable(map(dict.values, frames))), repeat(repeat("f_back")))
    outwards = map(takewhile, repeat(bool), map(accumulate, outwards, repeat(getattr)))  # frame, its f_back, its f_back
    return zip(chain.from_iterable(idents), map(tuple, map(map, repeat(_WHERE), outwards)))


def of_crash(text: str) -> tuple[StackLine, ...]:
    """The lines of the thread that crashed or was asked, in what a rank has printed; else those of the main thread."""
    stacks = read(text)
    blamed = next((stack for stack in stacks if stack.is_current), stacks[-1] if stacks else None)
    return blamed.lines if blamed else ()


def read(text: str) -> list[Stack]:
    """The stacks in a text, among whatever else was printed; the main thread's is the last one."""
    stacks: list[Stack] = []
    lines: list[StackLine] | None = None
    for row in text.splitlines():
        head, line = _HEAD.search(row), _LINE.fullmatch(row)
        if head:
            lines = []
            stacks.append((int(head[2] or "0", 16), head[1] != "Thread", lines))
        elif line and lines is not None:
            lines.append(StackLine(_unescaped(line[1]), int(line[2]), line[3]))
    return [Stack(ident, is_current, tuple(lines[::-1])) for ident, is_current, lines in stacks if lines]


def _unescaped(name: str) -> str:
    """A name as it is: faulthandler writes what is not ASCII as escapes."""
    return _ESCAPE.sub(lambda escape: chr(int("".join(filter(None, escape.groups())), 16)), name)
