"""Compiles templates so that they charge for what they build; see ``bounds``."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser

MOST_NESTED = 32
"""Levels of parentheses, calls and blocks. The parser and the compiler call themselves for each."""

DEEPEST_TREE = 100
"""Levels of a tree, to which each operator and attribute of a chain adds one."""

_PER_NODE = 8
"""Bytes charged for each node of a body that is repeated."""

_REBINDING: tuple[type[nodes.Node], ...] = (
    nodes.Assign,
    nodes.AssignBlock,
    nodes.With,
    nodes.For,
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
)
_MOST_PLAIN = 16
"""Operators up to which a template without variables of its own cannot build much."""


class TooComplexError(TemplateSyntaxError):
    """A template exceeds a limit; it may be well-formed."""


class BoundedParser(Parser):
    """Refuses what is nested too deep, before it exceeds Python's stack."""

    _nested = 0

    def _descend(self) -> None:
        self._nested += 1
        if self._nested > MOST_NESTED:
            message = f"nested deeper than {MOST_NESTED} levels; compute parts in steps of their own"
            self.fail(message, exc=TooComplexError)

    def parse_unary(self, with_filter: bool = True) -> nodes.Expr:
        """Parses an operand, which may be an expression in parentheses."""
        self._descend()
        node = super().parse_unary(with_filter)
        self._nested -= 1
        return node

    def parse_not(self) -> nodes.Expr:
        """Parses ``not x``, where x may be ``not y``."""
        if not self.stream.current.test("name:not"):
            return super().parse_not()
        self._descend()
        node = super().parse_not()
        self._nested -= 1
        return node

    def parse_condexpr(self) -> nodes.Expr:
        """Parses ``x if y else z``, where z may be another one."""
        self._descend()
        node = super().parse_condexpr()
        self._nested -= 1
        return node

    def parse_statement(self) -> nodes.Node | list[nodes.Node]:
        """Parses a tag with its body."""
        self._descend()
        node = super().parse_statement()
        self._nested -= 1
        return node

    def parse(self) -> nodes.Template:
        """Parses the template."""
        tree = super().parse()
        waiting: list[tuple[nodes.Node, int]] = [(tree, 0)]
        while waiting:
            node, depth = waiting.pop()
            if depth > DEEPEST_TREE:
                message = f"a chain of more than {DEEPEST_TREE} operators or names; compute parts in steps"
                self.fail(message, 1, TooComplexError)
            depth += 1
            waiting.extend((child, depth) for child in node.iter_child_nodes())
        return tree


class BoundedCodeGenerator(CodeGenerator):
    """Charges for repeated bodies, and passes growing operators to their bounded form.

    A template without loops and variables of its own computes each of its operators once. It gets the plain ones.
    """

    _repeats = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._costs: dict[int, int] = {}
        self._whole: list[nodes.Node] = []

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        """Compiles the template."""
        operators: tuple[type[nodes.Node], ...] = (nodes.Add, nodes.Concat, nodes.Mul)
        # the result of an expression is assigned, and not used again
        body = node.body[0].node if len(node.body) == 1 and isinstance(node.body[0], nodes.Assign) else node
        self._repeats = (
            next(body.find_all(_REBINDING), None) is not None or sum(1 for _ in body.find_all(operators)) > _MOST_PLAIN
        )
        self._whole = node.body
        super().visit_Template(node, frame)

    def _cost(self, *parts: nodes.Node) -> int:
        return _PER_NODE * (2 + sum(1 for one in parts for _ in (one, *one.find_all(nodes.Node))))

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        """Compiles a loop, which is charged when it begins; a recursive one for each item."""
        self._costs[id(node.body if node.recursive else node.iter)] = self._cost(
            *node.body, *([node.test] if node.test is not None else ())
        )
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> Any:
        """Compiles the body of a macro or of a call."""
        self._costs[id(node.body)] = self._cost(*node.body)
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        """Compiles a body."""
        cost = self._costs.get(id(nodes))
        if cost is not None:
            self.writeline(f"context.charge({cost})")
        elif self._repeats and nodes is self._whole:
            self.writeline("context.track()")
        super().blockvisit(nodes, frame)

    def visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> Any:
        """Compiles a node; the items of a loop are counted."""
        cost = self._costs.get(id(node))
        if cost is None:
            return super().visit(node, *arguments, **named)
        self.write("context.counted(")
        super().visit(node, *arguments, **named)
        self.write(f", {cost})")
        return None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        """Computes nothing while compiling: only literal texts and values are constants."""
        if not isinstance(node, nodes.Const | nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.buffer is None or frame.eval_ctx.autoescape or frame.eval_ctx.volatile:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("context.text(")

    def _call(self, function: str, frame: Frame, *operands: nodes.Node) -> None:
        self.write(f"environment.{function}(context, ")
        for operand in operands:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Compiles ``+``."""
        if self._repeats:
            self._call("plus", frame, node.left, node.right)
        else:
            super().visit_Add(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Compiles ``~``."""
        if self._repeats:
            self._call("joined", frame, nodes.Tuple(node.nodes, "load"))
        else:
            super().visit_Concat(node, frame)

    def visit_Mul(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Compiles ``*``."""
        if self._repeats:
            self._call("times", frame, node.left, node.right)
        else:
            self._of_integers("*", "times", node, frame)

    def visit_Mod(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Compiles ``%``, which formats texts."""
        self._of_integers("%", "remainder", node, frame)

    def visit_Pow(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Compiles ``**``."""
        self._call("power", frame, node.left, node.right)

    def _of_integers(self, operator: str, function: str, node: nodes.BinExpr, frame: Frame) -> None:
        """Writes an operator that needs no bounds if both sides are integers, as most are."""
        left, right = self.temporary_identifier(), self.temporary_identifier()
        self.write(f"({left} {operator} {right} if (({left} := ")
        self.visit(node.left, frame)
        self.write(f").__class__ is int) & (({right} := ")
        self.visit(node.right, frame)
        self.write(f").__class__ is int) else environment.{function}(context, {left}, {right}))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        """Compiles a list."""
        self._container(node, frame, super().visit_List)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Compiles a mapping."""
        self._container(node, frame, super().visit_Dict)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """Compiles a tuple, or the names that a loop or assignment sets."""
        if node.ctx == "load" and node.items:
            self._container(node, frame, super().visit_Tuple)
        else:
            super().visit_Tuple(node, frame)

    def _container(self, node: Any, frame: Frame, visit: Any) -> None:
        if not self._repeats:
            visit(node, frame)
            return
        self.write("context.built(")
        visit(node, frame)
        self.write(")")


class _NameFinder(TrackingCodeGenerator):
    """Jinja's analysis of names, which would compute constants on its way."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.optimizer = None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.Const | nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def undeclared_names(tree: nodes.Template) -> set[str]:
    """Returns the names that a template does not define itself."""
    assert tree.environment is not None
    finder = _NameFinder(tree.environment)
    finder.visit(tree)
    return finder.undeclared_identifiers
