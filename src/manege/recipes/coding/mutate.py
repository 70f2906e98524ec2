"""Bugs, made by changing one place of a function. Pure.

In: the text of a Python file. Out: mutations, each an edit of the text, so that all the rest of the file stays as it
was written. The kinds are those of SWE-smith's procedural bugs (https://github.com/SWE-bench/SWE-smith).
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Edit", "Function", "Mutation", "functions", "mutations"]

Scope = ast.FunctionDef | ast.AsyncFunctionDef
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "/", "%": "//", "<<": ">>", ">>": "<<", "&": "|", "|": "&"}
_COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
_LOGIC = {"and": "or", "or": "and"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Where a function stands in its file."""

    name: str
    """With the classes and functions around it."""
    first_line: int
    """As Python counts them: of its first decorator, if it has one."""
    docstring: str


@dataclass(frozen=True, slots=True)
class Edit:
    """New text for a stretch of a file."""

    start: int
    """In bytes of UTF-8, as is `end`."""
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One bug."""

    kind: str
    function: Function
    line: int
    """Where it begins."""
    edits: Sequence[Edit]

    def of(self, text: str) -> str:
        """The whole file with the bug in it. Raises ValueError, SyntaxError if it is no Python any more."""
        data = text.encode()
        for edit in sorted(self.edits, key=lambda edit: edit.start, reverse=True):
            data = data[: edit.start] + edit.text.encode() + data[edit.end :]
        compile(data, "mutant", "exec", dont_inherit=True)
        return data.decode()


class _Source:
    """A file's text, by the places that its syntax tree names."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.data = text.encode()
        self._starts = [0, *(found.end() for found in re.finditer(b"\n", self.data))]
        blocks = (block for node in ast.walk(tree) for _, block in ast.iter_fields(node) if isinstance(block, list))
        self._lonely = {id(block[0]) for block in blocks if len(block) == 1}
        """Statements that are all of a block."""

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(self.start(node), self.end(node), text)

    def word(self, before: ast.expr, after: ast.expr, word: str, new: str) -> Iterator[Edit]:
        """What stands between two expressions, if it is this word alone, brackets apart."""
        start, end = self.end(before), self.start(after)
        pattern = rb"[\s()\\]*(" + rb"\s+".join(re.escape(part.encode()) for part in word.split()) + rb")[\s()\\]*"
        if found := re.fullmatch(pattern, self.data[start:end]):
            yield Edit(start + found.start(1), start + found.end(1), new)

    def remove(self, node: ast.stmt) -> Sequence[Edit]:
        """With its lines; where nothing else is in its block, or on its line, `pass` takes its place."""
        start, end = self.start(node), self.end(node)
        line = self.data.rfind(b"\n", 0, start) + 1
        after = self.data.find(b"\n", end)
        shared = self.data[line:start].strip() or after < 0 or self.data[end:after].strip()
        # An `elif` is alone in the `else` that Python takes it for.
        lonely = id(node) in self._lonely and not self.data.startswith(b"elif", start)
        return [Edit(start, end, "pass") if shared or lonely else Edit(line, after + 1, "")]


def functions(text: str) -> Sequence[Function]:
    """Of a file, without those inside others. Raises SyntaxError."""
    return [function for function, _ in _functions(ast.parse(text), "")]


def mutations(text: str) -> Iterator[Mutation]:
    """All that can be done to its functions, in the order of the text. Raises SyntaxError."""
    tree = ast.parse(text)
    source = _Source(text, tree)
    for function, scope in _functions(tree, ""):
        for kind, make in KINDS.items():
            for node in _inside(scope):
                for edits in make(source, node, scope):
                    yield Mutation(kind=kind, function=function, line=getattr(node, "lineno", 0), edits=edits)


def _functions(tree: ast.AST, above: str) -> Iterator[tuple[Function, Scope]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Scope):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield Function(name=above + node.name, first_line=first, docstring=ast.get_docstring(node) or ""), node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{above}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node, above)


def _inside(scope: Scope) -> Iterator[ast.AST]:
    """The nodes of its body; annotations and docstrings are no code."""
    for statement in scope.body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            yield from ast.walk(statement)


Edits = Iterator[Sequence[Edit]]


def _op_change(source: _Source, node: ast.AST, _: Scope) -> Edits:
    if isinstance(node, ast.BinOp) and not _is_text(node.left):
        for old, new in _ARITHMETIC.items():
            for edit in source.word(node.left, node.right, old, new):
                yield [edit]
    elif isinstance(node, ast.AugAssign):
        for old, new in _ARITHMETIC.items():
            for edit in source.word(node.target, node.value, f"{old}=", f"{new}="):
                yield [edit]


def _compare_flip(source: _Source, node: ast.AST, _: Scope) -> Edits:
    if isinstance(node, ast.Compare):
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            for old, new in _COMPARISONS.items():
                for edit in source.word(left, right, old, new):
                    yield [edit]


def _logic_change(source: _Source, node: ast.AST, _: Scope) -> Edits:
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        for old, new in _LOGIC.items():
            for edit in source.word(node.values[0], node.values[1], old, new):
                yield [edit]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield [source.replace(node, source.of(node.operand))]


def _constant(source: _Source, node: ast.AST, _: Scope) -> Edits:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        value = node.value
        for new in [not value] if isinstance(value, bool) else [value + 1, value - 1]:
            yield [source.replace(node, repr(new))]


def _invert_if(source: _Source, node: ast.AST, _: Scope) -> Edits:
    if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare):
        yield [source.replace(node.test, f"not ({source.of(node.test)})")]
    if isinstance(node, ast.IfExp):
        yield [source.replace(node.body, source.of(node.orelse)), source.replace(node.orelse, source.of(node.body))]


def _remove_branch(source: _Source, node: ast.AST, _: Scope) -> Edits:
    """The whole of an `if`, or its `else`."""
    if not isinstance(node, ast.If):
        return
    if not node.orelse:
        yield source.remove(node)
    elif not isinstance(node.orelse[0], ast.If):
        start = source.end(node.body[-1])
        yield [Edit(start, source.end(node.orelse[-1]), "")]


def _remove_loop(source: _Source, node: ast.AST, _: Scope) -> Edits:
    if isinstance(node, ast.For | ast.While):
        yield source.remove(node)


def _remove_assignment(source: _Source, node: ast.AST, scope: Scope) -> Edits:
    """Of something that has a value all the same: a bug, and no undefined name."""
    if isinstance(node, ast.AugAssign):
        yield source.remove(node)
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if not isinstance(target, ast.Name) or _has_value_before(target, scope):
            yield source.remove(node)


def _remove_call(source: _Source, node: ast.AST, _: Scope) -> Edits:
    """Of something that is called for its effect."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield source.remove(node)


def _remove_try(source: _Source, node: ast.AST, _: Scope) -> Edits:
    """What is done about errors: the kinds that are caught become one that nobody raises."""
    if isinstance(node, ast.ExceptHandler) and node.type is not None:
        yield [source.replace(node.type, "GeneratorExit")]


def _swap_operands(source: _Source, node: ast.AST, _: Scope) -> Edits:
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.Add)
        and not _is_text(node.left)
    ):
        yield [source.replace(node.left, source.of(node.right)), source.replace(node.right, source.of(node.left))]


def _swap_arguments(source: _Source, node: ast.AST, _: Scope) -> Edits:
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second = node.args[:2]
        if not any(isinstance(argument, ast.Starred | ast.GeneratorExp) for argument in (first, second)):
            yield [source.replace(first, source.of(second)), source.replace(second, source.of(first))]


def _is_text(node: ast.expr) -> bool:
    """Formatting is no arithmetic: it would fail whatever the values are."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _has_value_before(target: ast.Name, scope: Scope) -> bool:
    arguments = [argument.arg for argument in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)]
    earlier = (
        isinstance(node, ast.Name)
        and node.id == target.id
        and isinstance(node.ctx, ast.Store)
        and node.lineno < target.lineno
        for node in ast.walk(scope)
    )
    return target.id in arguments or any(earlier)


KINDS: Mapping[str, Callable[[_Source, ast.AST, Scope], Edits]] = {
    "op_change": _op_change,
    "compare_flip": _compare_flip,
    "logic_change": _logic_change,
    "constant": _constant,
    "invert_if": _invert_if,
    "remove_branch": _remove_branch,
    "remove_loop": _remove_loop,
    "remove_assignment": _remove_assignment,
    "remove_call": _remove_call,
    "remove_try": _remove_try,
    "swap_operands": _swap_operands,
    "swap_arguments": _swap_arguments,
}
"""By the names that they have in the ids of tasks."""
