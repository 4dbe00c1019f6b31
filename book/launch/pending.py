"""L2: name the operation behind a `wait()` by reading the source of the frame that waits.

A request (`work = dist.irecv(buf, left)`) does not store its peer. It was noted when the request was made (see
requests); where there is no note, as for a collective, the line that created the request names it.
"""
from __future__ import annotations

import ast
import linecache
import sys
from types import FrameType
from typing import Any

from book.launch import requests
from book.waiting.doing import ANY, Doing, Kind

POINT_TO_POINT = {"isend": "dst", "irecv": "src", "send": "dst", "recv": "src"}


def call_name(call: ast.Call | None) -> str | None:
    """The last name in what is called: "wait" in `requests[0].wait()`."""
    if call is None:
        return None
    return getattr(call.func, "attr", None) or getattr(call.func, "id", None)


def peer(name: str, src: Any, dst: Any) -> tuple[int | None, str]:
    """The peer of an operation and its side: (1, "src"), (2, "dst"), (ANY, "src"), or (None, "") if it has none."""
    if isinstance(src, int):
        return src, "src"
    if isinstance(dst, int):
        return dst, "dst"
    return (ANY, "src") if name in ("recv", "irecv") else (None, "")


def current_call(frame: FrameType) -> ast.Call | None:
    """The call that a frame is in, read from its source; None if the source is unknown."""
    text = _segment(frame) or linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()
    try:
        nodes = list(ast.walk(ast.parse(text.rstrip(":"))))
    except SyntaxError:
        return None
    return next((node for node in nodes if isinstance(node, ast.Call)), None)


def _segment(frame: FrameType) -> str | None:
    """Exactly the expression being evaluated; None before Python 3.11, which does not record columns."""
    if sys.version_info < (3, 11):
        return None
    first, last, start, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if first is None or last is None or start is None or end is None:
        return None
    lines = [linecache.getline(frame.f_code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(errors="replace").strip()


def describe(frame: FrameType, innermost: FrameType) -> Doing:
    """What `frame` waits in or for: a request, keys of a store, or a call such as backward."""
    call = current_call(frame)
    name = call_name(call) or call_name(current_call(innermost)) or "a call"
    if name != "wait" or call is None or not isinstance(call.func, ast.Attribute):
        return Doing(Kind.CALL, name)
    if keys := keys_of_store(call, frame):
        return Doing(Kind.KEYS, keys=keys)
    if made := requests.made(_value(call.func.value, frame)):
        src, dst = (made.peer if made.call == name else None for name in ("irecv", "isend"))
        return Doing(Kind.REQUEST, made.call, *peer(made.call, src, dst))
    origin = _origin(call.func.value, frame)
    return _point_to_point(origin, frame) if origin is not None else Doing(Kind.REQUEST)


def keys_of_store(call: ast.Call, frame: FrameType) -> tuple[str, ...] | None:
    """The keys, if `call` gets or waits for keys of a store of torch.distributed; else None."""
    if call_name(call) not in ("get", "multi_get", "wait") or not isinstance(call.func, ast.Attribute) or not call.args:
        return None  # torch names none of these arguments
    import torch.distributed as dist
    keys = _value(call.args[0], frame)
    if not isinstance(_value(call.func.value, frame), dist.Store) or not keys:
        return None
    return (keys,) if isinstance(keys, str) else tuple(keys)


def _point_to_point(call: ast.Call, frame: FrameType) -> Doing:
    """The request of a call node `dist.irecv(buf, left)`, its peer evaluated in `frame`."""
    name = call_name(call) or ""
    side = POINT_TO_POINT.get(name)
    if side is None:
        return Doing(Kind.REQUEST, name)
    nodes = [keyword.value for keyword in call.keywords if keyword.arg == side] or call.args[1:2]
    known = {side: _value(nodes[0], frame) if nodes else None}
    return Doing(Kind.REQUEST, name, *peer(name if not nodes else "", known.get("src"), known.get("dst")))


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Evaluate names and arithmetic in a frame; None if that would call something."""
    if any(isinstance(part, (ast.Call, ast.Await, ast.NamedExpr)) for part in ast.walk(node)):
        return None
    try:
        return eval(compile(ast.Expression(node), "<peer>", "eval"), frame.f_globals, dict(frame.f_locals))
    except Exception:
        return None


def _origin(node: ast.expr, frame: FrameType) -> ast.Call | None:
    """The call that made the request which expression `node` stands for, found in the frame's source."""
    if isinstance(node, ast.Call):
        return node
    if isinstance(node, ast.Name):
        made = _assigned(node.id, frame)
        if made is not None:
            return made if isinstance(made, ast.Call) and call_name(made) != "batch_isend_irecv" else None
        return _looped(node.id, frame)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _element(_assigned(node.value.id, frame), _value(node.slice, frame))
    return None


def _looped(name: str, frame: FrameType) -> ast.Call | None:
    """The call that made the request that `for name in requests:` has reached, if `requests` is a list literal."""
    for node in _statements(frame):
        if not (isinstance(node, ast.For) and isinstance(node.target, ast.Name) and node.target.id == name):
            continue
        if isinstance(node.iter, ast.Name):
            requests, written = frame.f_locals.get(node.iter.id), _assigned(node.iter.id, frame)
            if isinstance(requests, (list, tuple)):
                index = next((i for i, item in enumerate(requests) if item is frame.f_locals.get(name)), None)
                return _element(written, index)
    return None


def _element(node: ast.expr | None, index: Any) -> ast.Call | None:
    if not isinstance(node, (ast.List, ast.Tuple)) or not isinstance(index, int):
        return None
    inside = -len(node.elts) <= index < len(node.elts)
    element = node.elts[index] if inside else None
    return element if isinstance(element, ast.Call) else None


def _assigned(name: str, frame: FrameType) -> ast.expr | None:
    """The value last assigned to `name` above the line that the frame is at."""
    value = None
    for node in _statements(frame):
        if isinstance(node, ast.Assign) and node.lineno <= frame.f_lineno:
            value = _paired(node, name) or value
    return value


def _paired(node: ast.Assign, name: str) -> ast.expr | None:
    """What an assignment gives to `name`, also in `a, b = make_a(), make_b()`."""
    for target in node.targets:
        if isinstance(target, ast.Name) and target.id == name:
            return node.value
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for part, value in zip(target.elts, node.value.elts):
                if isinstance(part, ast.Name) and part.id == name:
                    return value
    return None


def _statements(frame: FrameType) -> list[ast.stmt]:
    """Statements of the function that the frame runs, in the order of their lines."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == frame.f_code.co_name:
            if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno):
                statements = [part for part in ast.walk(node) if isinstance(part, ast.stmt)]
                return sorted(statements, key=lambda part: part.lineno)
    return []
