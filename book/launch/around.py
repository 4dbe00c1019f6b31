"""L2: what stands around a line in the learner's source, and decides whether a rank reaches it."""
from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Sequence
from typing import Any

from book.launch.where import place_of
from book.tap.log import Place
from book.waiting.history import CallSite, Condition, Handler

# A condition that names what differs between ranks is the likeliest of several.
_OF_RANKS = re.compile(r"rank|main|master|leader|is_first|is_last", re.IGNORECASE)
_MAIN = re.compile(r"if __name__ == '__main__'")  # which holds on all ranks
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_TRIES: tuple[Any, ...] = (ast.Try, *([ast.TryStar] if hasattr(ast, "TryStar") else []))  # `except*` is of Python 3.11
_ENDS = (ast.Return, ast.Continue, ast.Break)


@functools.cache
def line(chain: Sequence[Place]) -> CallSite:
    """The innermost of a chain of lines, with the conditions that all of them stand under."""
    if not chain:
        return CallSite()
    paths = {place: _path(*place) for place in chain}
    conditions = [found for place in chain for found in _conditions(paths[place], place[1])]
    likely = [found for found in conditions if _OF_RANKS.search(found.text)]
    handler, block = next((found for place in chain for found in _handlers(place[0], paths[place])), (None, 0))
    loops = [_head(node) for node in _loops(paths[chain[0]])]
    leaves = next((found for place in chain for found in _breaks(paths[place])), "")
    return CallSite(str(place_of(*chain[0])), chain[0][1], loops[-1] if loops else "",
                    next(iter(likely or conditions), None), handler, block, leaves)


@functools.cache
def in_loop(filename: str, number: int) -> bool:
    """Whether a line stands in the body of a loop of its function."""
    return bool(_loops(_path(filename, number)))


def _loops(path: Sequence[tuple[ast.AST, str]]) -> list[ast.AST]:
    """The loops that have a line in their bodies, outermost first."""
    return [node for node, part in path if isinstance(node, (ast.For, ast.While)) and part == "body"]


def _breaks(path: Sequence[tuple[ast.AST, str]]) -> Iterator[str]:
    """What may end the loops that have a line in their bodies, innermost loop first: "if loss < best: break"."""
    for loop in reversed(_loops(path)):
        inside = [*ast.iter_child_nodes(loop)]
        while inside:
            node = inside.pop(0)
            if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Break):
                yield f"{_head(node)}: break"
            if not isinstance(node, (ast.For, ast.While, *_FUNCTIONS)):  # whose breaks are their own
                inside += ast.iter_child_nodes(node)


@functools.cache
def _tree(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None


def _path(filename: str, number: int) -> list[tuple[ast.AST, str]]:
    """The nodes around a line, from its function inwards, each with the name of its part that has the line."""
    node: ast.AST | None = _tree(filename)
    path: list[tuple[ast.AST, str]] = []
    while node is not None:
        part, inner = _inner(node, number)
        path = [] if isinstance(inner, _FUNCTIONS) else [*path, (node, part)]
        node = inner
    return path


def _inner(node: ast.AST, number: int) -> tuple[str, Any]:
    """The part of a node that has a line, and its node there; None if the line is the node's own."""
    for part, value in ast.iter_fields(node):
        for inner in value if isinstance(value, list) else [value]:
            first, last = _lines(inner)
            if first <= number <= last and not (part == "test" and _is_on_one_line(node)):
                return part, inner
    return "", None


def _is_on_one_line(node: Any) -> bool:
    """Whether what an `if` decides stands behind it on its line; where its test calls nothing, a call is there."""
    calls = any(isinstance(inner, ast.Call) for inner in ast.walk(node.test))
    return isinstance(node, ast.If) and node.body[0].lineno == node.lineno and not calls


def _lines(node: Any) -> tuple[int, int]:
    """The first and the last line of a node; (1, 0) of what has none. A `case` has those of its pattern and body."""
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, node.body[-1].end_lineno or 0
    return getattr(node, "lineno", 1), getattr(node, "end_lineno", 0) or 0


def _conditions(path: Sequence[tuple[ast.AST, str]], number: int) -> Iterator[Condition]:
    """What decides whether a line is reached: in the innermost loop around it first, then outside of that.

    A loop that breaks before a line has come to it less often: that says nothing unless it is a matter of ranks.
    """
    loops = _loops(path)
    inner = next((place for place, (node, _) in enumerate(path) if node is loops[-1]), 0) if loops else 0
    for some in (path[inner:], path[:inner]):
        yield from _conditions_of(some, number)


def _conditions_of(path: Sequence[tuple[ast.AST, str]], number: int) -> Iterator[Condition]:
    """What a line stands under, innermost first; then what may leave it out by returning before it."""
    for node, part in reversed(path):
        if isinstance(node, ast.If) and part in ("body", "orelse") and not _MAIN.fullmatch(_head(node)):
            yield Condition("under" if part == "body" else "in the else of", _head(node))
        if isinstance(node, ast.match_case) and part == "body":
            yield Condition("under", _head(node))
    for node, part in reversed(path):
        block = getattr(node, part, None) if part in ("body", "orelse") else None
        for earlier in block if isinstance(block, list) else ():  # a lambda's body is no list
            if isinstance(earlier, ast.If) and (earlier.end_lineno or 0) < number and not earlier.orelse and (
                    isinstance(end := earlier.body[-1], _ENDS)) and (
                    not isinstance(end, ast.Break) or _OF_RANKS.search(_head(earlier))):
                yield Condition("after", f"{_head(earlier)}: {ast.unparse(end)}")


def _head(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0].rstrip(":")


def _handlers(filename: str, path: Sequence[tuple[ast.AST, str]]) -> Iterator[tuple[Handler, int]]:
    """What catches an error at a line and goes on, innermost first, and the line of its `try`."""
    for node, part in reversed(path):
        if isinstance(node, _TRIES) and part == "body":
            star = "" if isinstance(node, ast.Try) else "*"
            for handler in node.handlers:
                if _ways_out(handler.body) != {ast.Raise}:
                    yield Handler(f"except{star} {ast.unparse(handler.type)}" if handler.type else "except",
                                  str(place_of(filename, handler.body[0].lineno))), node.lineno
        if isinstance(node, ast.With) and part == "body":
            for item in node.items:
                if re.search(r"\bsuppress\(", ast.unparse(item.context_expr)):
                    yield Handler(f"with {ast.unparse(item.context_expr)}", ""), node.lineno


def _ways_out(statements: Sequence[ast.stmt]) -> set[type[ast.AST]]:
    """How statements may be left: `ast.Raise`, one of `_ENDS`, or `ast.Pass` for behind the last one."""
    found: set[type[ast.AST]] = set()
    for statement in statements:
        if isinstance(statement, (ast.Raise, *_ENDS)):
            return found | {type(statement)}
        if isinstance(statement, ast.If):
            inner = _ways_out(statement.body) | _ways_out(statement.orelse)
            found |= inner - {ast.Pass}
            if ast.Pass not in inner:
                return found
    return found | {ast.Pass}
