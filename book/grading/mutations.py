"""L4: small faults that are put into an answer; each stands for a mistake that learners make."""
from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SYMMETRIC = {"max", "min", "mse_loss", "transpose"}  # functions whose first two arguments may be exchanged
Change = Callable[[ast.AST], list[ast.AST]]  # a node's possible replacements; the node itself must not be changed


@dataclass(frozen=True)
class Mutation:
    """A kind of fault: its name, and the learner's mistake that it stands for."""

    name: str
    mistake: str
    change: Change


@dataclass(frozen=True)
class Mutant:
    """An answer with one fault: the kind, its line (from 1), that line before and after, the whole source."""

    mutation: Mutation
    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """The mutant's name, which stays the same as long as its line of the answer does: "before -> after"."""
        return f"{self.before} -> {self.after}"


def mutants(source: str) -> Iterator[Mutant]:
    """Every answer that differs from `source` in one fault of `MUTATIONS`; equal sources come only once."""
    seen = {ast.unparse(ast.parse(source))}
    for position, node in enumerate(_nodes(ast.parse(source))):
        for mutation, new in ((each, new) for each in MUTATIONS for new in each.change(node)):
            mutant = _replaced(source, position, mutation, new)
            if mutant.source not in seen:
                seen.add(mutant.source)
                yield mutant


def _replaced(source: str, position: int, mutation: Mutation, new: ast.AST) -> Mutant:
    """The mutant with `new` in the place of the node at `position`."""
    tree = ast.parse(source)
    old = _nodes(tree)[position]
    statement = _statement(tree, old)
    before = _first_line(statement)
    text = ast.unparse(ast.fix_missing_locations(_Replace(old, new).visit(tree)))
    after = "" if isinstance(new, ast.Pass) else _first_line(new if old is statement else statement)
    return Mutant(mutation, statement.lineno, before, after, text)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes in the order of the source, without docstrings."""
    return [node for node in ast.walk(tree)
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


def _statement(tree: ast.Module, node: ast.AST) -> ast.stmt:
    """The innermost statement that a node is in."""
    holders = [stmt for stmt in ast.walk(tree) if isinstance(stmt, ast.stmt) and any(n is node for n in ast.walk(stmt))]
    return min(holders, key=lambda stmt: sum(1 for _ in ast.walk(stmt)))


def _first_line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).split("\n")[0]


# Replacements of a node

def _operators(pairs: dict[type, list[type]]) -> Change:
    """Changes `a op b` and `a op= b` to other operators."""
    def change(node: ast.AST) -> list[ast.AST]:
        if not isinstance(node, (ast.BinOp, ast.AugAssign)):
            return []
        return [_with(node, op=new()) for new in pairs.get(type(node.op), [])]
    return change


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with other fields."""
    new = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _comparison(node: ast.AST) -> list[ast.AST]:
    others: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in others:
        return [_with(node, ops=[others[type(node.ops[0])](), *node.ops[1:]])]
    return []


def _one_more(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "range" and node.args:
        places = [len(node.args) - 1] if len(node.args) < 3 else [1]
        return [_with(node, args=[_plus(arg, by) if i in places else arg for i, arg in enumerate(node.args)])
                for by in (1, -1)]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [ast.Constant(node.value + by) for by in (1, -1)]
    return []


def _plus(node: ast.expr, by: int) -> ast.expr:
    return ast.BinOp(copy.deepcopy(node), ast.Add() if by > 0 else ast.Sub(), ast.Constant(abs(by)))


def _no_statement(kinds: tuple[type, ...]) -> Change:
    """Leaves out statements of these kinds: calls whose result is not used, or in-place assignments."""
    def change(node: ast.AST) -> list[ast.AST]:
        dropped = isinstance(node, kinds) and (not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call))
        return [ast.Pass()] if dropped else []
    return change


def _exchanged_arguments(node: ast.AST) -> list[ast.AST]:
    if (isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args)
            and getattr(node.func, "attr", getattr(node.func, "id", None)) not in SYMMETRIC):
        return [_with(node, args=[node.args[1], node.args[0], *node.args[2:]])]
    return []


def _no_keyword(*names: str) -> Change:
    def change(node: ast.AST) -> list[ast.AST]:
        if not isinstance(node, ast.Call):
            return []
        return [_with(node, keywords=[other for other in node.keywords if other is not keyword])
                for keyword in node.keywords if keyword.arg in names]
    return change


def _no_method(*names: str) -> Change:
    """x.name(...) -> x."""
    def change(node: ast.AST) -> list[ast.AST]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            return [copy.deepcopy(node.func.value)]
        return []
    return change


def _no_remainder(node: ast.AST) -> list[ast.AST]:
    return [copy.deepcopy(node.left)] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) else []


def _names(pairs: dict[str, str]) -> Change:
    """Other names and attributes: `MAX` for `SUM`, `min` for `max`."""
    both = pairs | {new: old for old, new in pairs.items()}

    def change(node: ast.AST) -> list[ast.AST]:
        if isinstance(node, ast.Attribute) and node.attr in both:
            return [_with(node, attr=both[node.attr])]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in both:
            return [_with(node, id=both[node.id])]
        return []
    return change


def _negated(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, (ast.If, ast.IfExp)):
        return [_with(node, test=ast.UnaryOp(ast.Not(), copy.deepcopy(node.test)))]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [ast.Constant(not node.value)]
    return []


MUTATIONS = (
    Mutation("sign", "the wrong neighbour, or a difference for a sum",
             _operators({ast.Add: [ast.Sub], ast.Sub: [ast.Add]})),
    Mutation("factor", "a mean for a sum, or the other way round",
             _operators({ast.Mult: [ast.Div], ast.Div: [ast.Mult], ast.FloorDiv: [ast.Mult]})),
    Mutation("no remainder", "the ring is not closed", _no_remainder),
    Mutation("off by one", "one step, chunk or rank too many or too few", _one_more),
    Mutation("end", "the end of a range is wrongly included or left out", _comparison),
    Mutation("no call", "a wait, a collective, a copy or a step is forgotten", _no_statement((ast.Expr,))),
    Mutation("no update", "what arrived is not added or divided in place", _no_statement((ast.AugAssign,))),
    Mutation("exchanged arguments", "two arguments are exchanged", _exchanged_arguments),
    Mutation("wrong group", "the call goes to the whole world", _no_keyword("group")),
    Mutation("no option", "an option is forgotten",
             _no_keyword("src", "op", "async_op", "dim", "is_causal", "lr", "device", "dtype")),
    Mutation("shared memory", "a view where a copy belongs, or a graph that is kept",
             _no_method("clone", "detach", "contiguous")),
    Mutation("other name", "the opposite of what is meant",
             _names({"MAX": "SUM", "min": "max", "ColwiseParallel": "RowwiseParallel", "isend": "irecv",
                     "amax": "amin", "all_reduce_then_identity": "identity_then_all_reduce"})),
    Mutation("opposite condition", "a condition the wrong way round", _negated))
