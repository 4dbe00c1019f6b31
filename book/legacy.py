"""L3: old calls beside today's. Both run, and a row whose stated outcome is not the real one fails.

Nobody can type a row blindly: it states what the old code raises, warns of or gives, the code runs, and the sentence
shown is PyTorch's own. The new code has to run without a warning that it is deprecated.
"""
from __future__ import annotations

import builtins
import contextlib
import html
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from book.launch import LaunchError, launch
from book.words import capitalised

DEPRECATED = {"FutureWarning", "DeprecationWarning", "PendingDeprecationWarning", "Warning"}
IN_WORDS = {"ScriptError": "fails", "HangError": "hangs"}  # these are the book's own errors, not PyTorch's
TORCH_ITSELF = f"{os.sep}site-packages{os.sep}torch{os.sep}"
ON_STDERR = re.compile(r"(?:^|[\s\]])(\w*Warning): (.*)")  # "file.py:3: FutureWarning: text", "[W...] Warning: text"
ANSI, PATH = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r" \((?:function |/)[^)]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")


class LegacyError(AssertionError):
    """A row says of old or new code what is not so."""


class ScriptError(RuntimeError):
    """A script ended with an exit status other than 0; the message is its stderr."""


@dataclass(frozen=True)
class Warned:
    """A warning: its category's name, its text, and whether torch's own code is what it blames."""

    category: str
    text: str
    blames_torch: bool = False


@dataclass(frozen=True)
class CallOutcome:
    """What a call did: the name of the error that it raised and its message, what it warned of, what it returned."""

    error: str | None = None
    message: str = ""
    warned: tuple[Warned, ...] = ()
    value: Any = None


def observe(fn: Callable[[], Any]) -> CallOutcome:
    """Run `fn` and note what came of it; warnings are all caught, also those that Python shows once or never."""
    error, message, value = None, "", None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = fn()
        except Exception as raised:
            error, message = type(raised).__name__, str(raised)
    warned = {Warned(w.category.__name__, str(w.message), TORCH_ITSELF in w.filename): None for w in caught}
    return CallOutcome(error, message, tuple(warned), value)


def observe_ranks(fn: Callable[[], Any], world_size: int) -> CallOutcome:
    """Run `fn` on ranks and note what came of it: the first error, all warnings, the values by rank.

    Ranks that wait for one another are a `HangError`, whose message says where each of them is.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the line that names the backend, in every row
            run = launch(observe, world_size, fn)
    except LaunchError as raised:
        return CallOutcome(type(raised).__name__, str(raised))
    warned = {w: None for outcome in run for w in outcome.warned}
    warned |= {w: None for text in run.stderr for w in _on_stderr(text)}
    error, message = next(((o.error, o.message) for o in run if o.error), (None, ""))
    return CallOutcome(error, message, tuple(warned), [outcome.value for outcome in run])


def _on_stderr(text: str) -> list[Warned]:
    """The warnings in what a process wrote to stderr, by Python or by C++."""
    return [Warned(match[1], match[2]) for match in map(ON_STDERR.search, ANSI.sub("", text).splitlines()) if match]


def run_script(command: str, source: str = "", limit_s: float = 100) -> str:
    """Save `source` as train.py, run `command` beside it, and return what it printed, stripped.

    `python` in the command is this Python, `torchrun` its launcher. Warnings on stderr are given here again. Raises
    `ScriptError` when it ends with an error, or has not ended after `limit_s` seconds.
    """
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    words = [part for word in shlex.split(command) for part in programs.get(word, [word])]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(source, encoding="utf-8")
        process = subprocess.Popen(words, cwd=folder, env={**os.environ, "PYTHONWARNINGS": ""}, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            shown, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise ScriptError(f"{command} has not ended after {limit_s:g} s") from None
        finally:
            if process.returncode is None:
                _end(process)
    if process.returncode:
        raise ScriptError(ANSI.sub("", errors))
    for warned in _on_stderr(errors):
        warnings.warn(warned.text, getattr(builtins, warned.category, UserWarning), stacklevel=2)
    return shown.strip()


def _end(process: subprocess.Popen[str]) -> None:
    """End a script and what it has started: torchrun ends its ranks when it is asked to, but not when it is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
            return


@dataclass(frozen=True)
class Row:
    """An old call and today's, with what they did when they ran."""

    old: str
    new: str
    today: str     # words on it, Markdown
    happened: str  # "raises `ValueError`", "warns of a `FutureWarning`", "fails", "hangs" or "runs"
    said: str      # PyTorch's own sentence, "" where it said nothing
    gave: str      # what the old code returned, "" for None
    new_gave: str

    def _repr_markdown_(self) -> str:
        said = f": {_code(self.said)}." if self.said else "."
        gave = f" It gives {_code(self.gave)}." if self.gave else ""
        ran = f"It gives {_code(self.new_gave)}." if self.new_gave else "It runs."
        return f"**Today** it {self.happened}{said}{gave}\n\n{self.today}\n\n**Write** {_code(self.new)}. {ran}"

    def __repr__(self) -> str:
        return f"{self.old} {self.happened}; write {self.new}"


def _code(text: str) -> str:
    """Markdown for code that may hold backticks itself."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


@dataclass
class Section:
    """Old calls of one kind; `row` runs and keeps one."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def row(self, old_name: str, old: Callable[[], Any], new_name: str, new: Callable[[], Any], *, today: str,
            raises: type[Exception] | None = None, warns: type[Warning] | None = None, gives: Any = None,
            says: str = "", new_gives: Any = None, ranks: int = 0, old_here: bool = False) -> Row:
        """Run `old` and `new` and keep what came of them as a row: here, or with `ranks` each on so many new processes.

        `old` has to raise just `raises`, or else to warn of `warns` (None: of nothing deprecated) and to return
        `gives`; in the message has to stand `says`, and the sentence with it is shown. `new` has to return
        `new_gives` and must not raise or warn that something is deprecated. On ranks, what is returned is a list by
        rank, or None where all return None; `old_here` runs only `new` there. Raises `LegacyError` when a row is
        not so.
        """
        was = observe_ranks(old, ranks) if ranks and not old_here else observe(old)
        is_now = observe_ranks(new, ranks) if ranks else observe(new)
        happened, said = _check_old(old_name, was, raises, warns, says)
        _check_value(old_name, was.value, gives)
        _check_new(new_name, is_now)
        _check_value(new_name, is_now.value, new_gives)
        kept = Row(old_name, new_name, today, happened, said, _shown(gives), _shown(new_gives))
        self.rows = [row for row in self.rows if row.old != old_name] + [kept]  # a cell may run twice
        return kept


def _check_old(name: str, was: CallOutcome, raises: type | None, warns: type | None, says: str) -> tuple[str, str]:
    """What the old code did, in a few words, and the sentence in which it said so."""
    if was.error != (raises and raises.__name__):
        stated = f"raises {raises.__name__}" if raises else "runs"
        raise LegacyError(f"{name} {_did(was)}; the row says that it {stated}.")
    if was.error:
        return IN_WORDS.get(was.error, f"raises `{was.error}`"), _sentence(name, [was.message], says)
    if warns is None:
        if _deprecations(was):
            raise LegacyError(f"{name} {_did(was)}; the row says nothing of a warning.")
        return "runs", ""
    texts = [warned.text for warned in was.warned if warned.category == warns.__name__]
    if not texts:
        raise LegacyError(f"{name} {_did(was)}; the row says that it warns of a {warns.__name__}.")
    return f"warns of a `{warns.__name__}`", _sentence(name, texts, says)


def _check_new(name: str, is_now: CallOutcome) -> None:
    if is_now.error or _deprecations(is_now):
        raise LegacyError(f"{name}, the new code, {_did(is_now)}.")


def _check_value(name: str, value: Any, stated: Any) -> None:
    if isinstance(value, list) and stated is None and all(v is None for v in value):
        return
    if value != stated:
        raise LegacyError(f"{name} gives {value!r}; the row says {stated!r}.")


def _deprecations(outcome: CallOutcome) -> list[Warned]:
    """The warnings that concern the caller: a DeprecationWarning that torch gives itself is no concern of theirs."""
    return [w for w in outcome.warned if w.category in DEPRECATED
            and not (w.category == "DeprecationWarning" and w.blames_torch)]


def _did(outcome: CallOutcome) -> str:
    if outcome.error:
        return f"raises {outcome.error}: {outcome.message.strip()[-500:]}"
    if outcome.warned:
        return "warns: " + "; ".join(f"{w.category}: {w.text}" for w in outcome.warned)
    return "raises and warns of nothing"


def _sentence(name: str, texts: list[str], says: str) -> str:
    """The first sentence with `says` in it, without the paths of this machine."""
    sentences = [part for text in texts for part in SENTENCE_END.split(text) if says in part]
    if not sentences:
        raise LegacyError(f"{name} says {' '.join(texts)[-500:]!r}; the row says that {says!r} stands in it.")
    return PATH.sub("", sentences[0]).strip().removesuffix(".")


def _shown(value: Any) -> str:
    return "" if value is None else repr(value)


class Overview:
    """All rows of some sections in one table, each linked to its heading on the same page."""

    def __init__(self, *sections: Section) -> None:
        self.sections = sections

    def _repr_html_(self) -> str:
        body = "".join(f'<tr><th colspan="3" scope="rowgroup">{html.escape(section.title)}</th></tr>'
                       + "".join(map(_table_row, section.rows)) for section in self.sections)
        head = "".join(f'<th scope="col">{name}</th>' for name in ("Old", "Today", "Write"))
        return f'<table class="table call-map"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def __repr__(self) -> str:
        count = sum(len(section.rows) for section in self.sections)
        return f"{count} old calls in {len(self.sections)} sections"


def _table_row(row: Row) -> str:
    anchor = re.sub(r"[^a-z0-9]+", "-", row.old.lower()).strip("-")  # as docutils makes it from the heading
    today = f"{row.happened}. {SENTENCE_END.split(row.today)[0]}"
    words = re.sub("`(.*?)`", r"<code>\1</code>", html.escape(capitalised(today)))
    return (f'<tr><td><a href="#{anchor}">{_breakable(row.old)}</a></td>'
            f"<td>{words}</td><td>{_breakable(row.new)}</td></tr>")


def _breakable(call: str) -> str:
    """A call that may go on in the next line behind a dot, a bracket or an equals sign, or before an underscore."""
    return f"<code>{re.sub(r'(?<=[.(=])(?=[^.)=])|(?<=[a-z])(?=_)', '<wbr>', html.escape(call))}</code>"
