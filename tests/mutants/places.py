"""Plausible mistakes at places of a Python file: what a line says now, and what it would say with the mistake.

Owns the operators: the common ones of mutation testing, and those of code that shares tensors over ranks. A place is
code that computes: never a text, a message, a log, an annotation, a docstring or `__repr__`. Does not own which places
are tried, nor how.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Change = tuple[str, ast.AST, str]  # operator, what is replaced, by what

COMPARISONS = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*"}
EXCHANGES = re.compile(
    r"(start_)?(all_gather|all_to_all|alltoall_base|all_reduce|broadcast|maximum|shift)|_?gather(_\w+)?|gatherer"
    r"|i?send|i?recv|batch_isend_irecv|exchange|sendall|send_packet|send_fds"
)
WAITS = re.compile(r"wait|wait_\w+|synchronize|barrier|record_stream|acquire|join")
CUTS = re.compile(r"cut\w*|_?rows_of|\w*shard\w*|select|narrow|index_select|mine\w*|\w*slice\w*")
LENGTHS = re.compile(r"(\w+_)?(lengths|counts|sizes|splits|totals|widths|rows|tokens)")
VERSIONS = re.compile(r"version|generation|revision|fingerprint|digest|sha256|epoch|stamp|mtime", re.IGNORECASE)
# Which arguments of these are axes.
AXES_OF = {
    **dict.fromkeys(("transpose", "flatten", "squeeze", "unsqueeze", "movedim", "sum", "mean", "amax", "size"), (0, 1)),
    **dict.fromkeys(("cat", "stack", "split", "chunk", "split_with_sizes", "repeat_interleave"), (1,)),
    **dict.fromkeys(("narrow", "select", "index_select", "unflatten"), (0,)),
}
TEXTS = {"log", "_log", "logger", "warnings", "print", "say", "warn", "_say", "writer"}  # what is called for people
WORDS = {"tooltip", "help", "description", "display_name", "category", "text", "message", "remedy", "search_aliases"}
SMALL = 16
NOT_CODE = (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
FOR_PEOPLE = {"__repr__", "__str__", "describe"}


@dataclass(frozen=True)
class Place:
    """A mistake. file: relative to the repository. line: its own, statement: the first of its statement's.

    function: `Class.name`, empty outside functions. `text` stands at the bytes `begin` to `end` instead. before, after:
    the lines that it touches.
    """

    file: str
    line: int
    statement: int
    function: str
    operator: str
    begin: int
    end: int
    text: str
    before: str
    after: str

    @property
    def key(self) -> tuple[str, ...]:
        """What the place is known by while lines move. The same line may stand elsewhere, and matter there."""
        return self.file, self.function, self.operator, self.before, self.after

    def applied(self, source: str) -> str:
        """The file with the mistake."""
        data = source.encode()
        return (data[: self.begin] + self.text.encode() + data[self.end :]).decode()


def places(file: str, source: str) -> list[Place]:
    """All places of a file."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for statement, function, (operator, node, text) in _changes(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        first, last = starts[node.lineno - 1], starts[node.end_lineno]
        before, after = data[first:last].decode(), (data[first:begin] + text.encode() + data[end:last]).decode()
        shown = _one_line(before), _one_line(after)
        if shown[0] != shown[1]:
            found.append(Place(file, node.lineno, statement, function, operator, begin, end, text, *shown))
    return list(dict.fromkeys(found))


def chosen(everything: Iterable[Place], seed: int, count: int) -> list[Place]:
    """`count` places, by a seed: first the operator, then a place, so that rare kinds are tried as often."""
    by_operator = defaultdict(list)
    for place in everything:
        by_operator[place.operator].append(place)
    dice, taken = random.Random(seed), []  # noqa: S311  no secret
    while by_operator and len(taken) < count:
        operator = dice.choice(sorted(by_operator))
        left = by_operator[operator]
        taken.append(left.pop(dice.randrange(len(left))))
        if not left:
            del by_operator[operator]
    return taken


def functions(source: str) -> dict[str, tuple[int, int]]:
    """The first and the last line of each function of a file, by `Class.name`."""
    return {
        name: (node.lineno, node.end_lineno or node.lineno)
        for name, node in _named(ast.parse(source), "")
        if not isinstance(node, ast.ClassDef)
    }


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}".lstrip(".")
            yield name, child
            yield from _named(child, name)
        else:
            yield from _named(child, prefix)


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, Change]]:
    """Each mistake, with the line of its statement and the function that it is in."""

    def walk(node: ast.AST, line: int, name: str, function: str) -> Iterator[tuple[int, str, Change]]:
        if isinstance(node, NOT_CODE) or _for_people(node):
            return
        line = node.lineno if isinstance(node, ast.stmt) else line
        inside: Iterable[ast.AST] = _code_of(node)
        if isinstance(node, ast.Raise):
            yield line, function, ("statement left out", node, "pass")
            inside = ()
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
            function = function if isinstance(node, ast.ClassDef) else name
            inside = node.body
        else:
            ours = list(_ours(node))
            common = () if ours and isinstance(node, ast.Expr) else _common(node)  # it is left out once
            for change in (*ours, *common):
                yield line, function, change
        for child in inside:
            yield from walk(child, line, name, function)

    yield from walk(tree, 0, "", "")


def _for_people(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name in FOR_PEOPLE
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Call):
        sentences = node.args and all(isinstance(each, ast.JoinedStr) for each in node.args)
        return bool(sentences) or ast.unparse(node.func).split(".")[0] in TEXTS or _name(node.func) in TEXTS
    return isinstance(node, ast.keyword) and node.arg in WORDS


def _code_of(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that are code."""
    for field, value in ast.iter_fields(node):
        if field not in {"annotation", "returns", "ctx", "op", "ops", "decorator_list", "format_spec"}:
            yield from (
                child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
            )


def _common(node: ast.AST) -> Iterator[Change]:  # noqa: C901  one case an operator
    """The mistakes that any program may have."""
    match node:
        case ast.Compare(left, [operation], [right]) if type(operation) in COMPARISONS:
            yield "comparison", node, f"({_said(left)} {COMPARISONS[type(operation)]} {_said(right)})"
        case ast.BinOp(left, operation, right) if type(operation) in ARITHMETIC and not _is_text(node):
            yield "arithmetic", node, f"({_said(left)} {ARITHMETIC[type(operation)]} {_said(right)})"
        case ast.BoolOp(operation, values):
            word = " or " if isinstance(operation, ast.And) else " and "
            yield "boolean", node, f"({word.join(_said(value) for value in values)})"
        case ast.UnaryOp(ast.Not(), value):
            yield "boolean", node, _said(value)
        case ast.Constant(value) if type(value) is int and value <= SMALL:  # a limit of 513 is as good as one of 512
            yield "constant off by one", node, str(value + 1)
        case ast.Return(value) if value is not None and ast.unparse(value) != "None":
            yield "return None", node, "return None"
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(test, ast.Constant):
            yield "condition negated", test, f"(not {_said(test)})"
        case ast.comprehension(_, _, [test, *_]):
            yield "condition negated", test, f"(not {_said(test)})"
        case ast.Expr(ast.Call()) if not _for_people(node.value):
            yield "statement left out", node, "pass"
        case ast.AugAssign() | ast.Delete() | ast.Break() | ast.Continue() | ast.Expr(ast.Await()):
            yield "statement left out", node, "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()], _):
            yield "statement left out", node, "pass"


def _ours(node: ast.AST) -> Iterator[Change]:
    """The mistakes of code that shares tensors, files and requests over ranks."""
    match node:
        case ast.Expr(ast.Call(func)) if EXCHANGES.fullmatch(_name(func)):
            yield "exchange left out", node, "pass"
        case ast.Expr(ast.Call(func)) if WAITS.fullmatch(_name(func)):
            yield "wait not made", node, "pass"
        case ast.Call(func, [given, *_], _) if "mask" in ast.unparse(given) and CUTS.fullmatch(_name(func)):
            yield "mask not cut", node, _said(given)
        case ast.Call(func, [given, *_]) if EXCHANGES.fullmatch(_name(func)):
            yield "exchange left out", node, _said(given)
        case ast.Call(ast.Name("sum"), [lengths]) if LENGTHS.fullmatch(_name(lengths).lstrip("_")):
            yield "lengths taken as equal", node, f"({_said(lengths)}[0] * len({_said(lengths)}))"
        case ast.Subscript(value, index) if _is_place(index) and LENGTHS.fullmatch(_name(value).lstrip("_")):
            yield "lengths taken as equal", node, f"{_said(value)}[0]"
        case ast.Compare(_, [ast.Eq() | ast.NotEq() as operation], [_]) if VERSIONS.search(ast.unparse(node)):
            yield "version not compared", node, str(isinstance(operation, ast.Eq))
        case ast.Subscript(value, index) if "mask" in _name(value) and _slices(index):
            yield "mask not cut", node, _said(value)
        case ast.Subscript(value, ast.Slice(lower, upper, None)) if lower is not None:
            yield "part taken twice", node, f"{_said(value)}[:{_said(upper) if upper else ''}]"
    yield from _axes(node)


def _axes(node: ast.AST) -> Iterator[Change]:
    """Each axis of a tensor that is named by its number, as the one beside it."""
    named: list[ast.expr] = []
    if isinstance(node, ast.Call):
        named = [each.value for each in node.keywords if each.arg in {"dim", "axis", "dim0", "dim1"}]
        if isinstance(node.func, ast.Attribute):
            named += [node.args[place] for place in AXES_OF.get(node.func.attr, ()) if place < len(node.args)]
    if isinstance(node, ast.Subscript) and _name(node.value) == "shape":
        named = [node.slice]
    for each in named:
        number = ast.unparse(each)
        if re.fullmatch(r"-?\d", number):
            yield "axis swapped", each, str(int(number) + (1 if int(number) in (0, 1, -2, -3) else -1))


def _is_place(index: ast.expr) -> bool:
    """Whether an index says which of the ranks or parts."""
    return not isinstance(index, ast.Constant | ast.Slice | ast.Tuple | ast.UnaryOp)


def _slices(index: ast.expr) -> bool:
    """Whether an index cuts."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(part, ast.Slice) and (part.lower or part.upper) for part in parts)


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr) or isinstance(each, ast.Constant) and isinstance(each.value, str | bytes)
        for each in ast.walk(node)
    )


def _name(function: ast.AST) -> str:
    """The last word of `a.b.name`."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _said(node: ast.AST) -> str:
    """An expression in brackets where it may need them."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript) else f"({text})"


def _one_line(text: str) -> str:
    return " ".join(text.split())
