"""A second copy of a module that marks every step it takes, so that a fuzzer sees which inputs reach something new.

Owns rewriting a module's tree. Any Python can do this, and marks cost a tenth of what tracing costs; a fuzzer that
needs its own build of the interpreter's tools would not run everywhere that the tests run.
"""

import ast
import importlib
import importlib.util
from types import ModuleType
from typing import cast

MARK = "__mark__"


class Edges:
    """Which step was taken after which, as AFL counts: pairs of marks. `new` is reset by whoever reads it."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.new = False
        self._last = 0

    def mark(self, number: int) -> None:
        """Step `number` is taken now. Returns None, so that `mark(n) or value` is `value`."""
        edge = self._last << 16 | number
        self._last = number
        if edge not in self.seen:
            self.seen.add(edge)
            self.new = True

    def begin(self) -> None:
        """Another input comes."""
        self._last = 0
        self.new = False


def marked_module(name: str, edges: Edges) -> ModuleType:
    """The module `name`, executed once more from its source, telling `edges` where it goes."""
    importlib.import_module(name)  # dataclasses look their module up by name
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"{name} has no source")
    with open(spec.origin, encoding="utf-8") as file:
        tree = _Marker().visit(ast.parse(file.read(), spec.origin))
    module = importlib.util.module_from_spec(spec)
    vars(module)[MARK] = edges.mark
    exec(compile(ast.fix_missing_locations(tree), spec.origin, "exec"), vars(module))  # noqa: S102  our own source
    return module


class _Marker(ast.NodeTransformer):
    """Puts a mark before every statement of a function, and into every branch of an expression."""

    def __init__(self) -> None:
        self._number = 0
        self._inside = 0

    def _call(self) -> ast.Call:
        self._number += 1
        return ast.Call(ast.Name(MARK, ast.Load()), [ast.Constant(self._number)], [])

    def _marked(self, value: ast.expr) -> ast.expr:
        return ast.BoolOp(ast.Or(), [self._call(), value])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._inside += 1
        self.generic_visit(node)
        self._inside -= 1
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if not self._inside:
            return node
        if isinstance(node, ast.BoolOp):
            node.values[1:] = [self._marked(value) for value in node.values[1:]]
        elif isinstance(node, ast.IfExp):
            node.body, node.orelse = self._marked(node.body), self._marked(node.orelse)
        elif isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            node.elt = self._marked(node.elt)
        for field in ("body", "orelse", "finalbody"):
            body = vars(node).get(field)
            if isinstance(body, list):
                marked = [[ast.Expr(self._call()), cast(ast.stmt, each)] for each in body]
                setattr(node, field, [each for pair in marked for each in pair])
        return node
