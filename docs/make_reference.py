"""Write the API reference, docs/reference/*.md, from the docstrings of the public modules.

    python docs/make_reference.py

Parses the source files and imports none of them. The public names of a package are those of its `__all__`; of a
module, all names without a leading underscore that it defines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
MODULES = (
    *("vlora.client", "vlora.types", "vlora.errors", "vlora.config", "vlora.engine", "atmm", "heads"),
    *("vlora.routing", "vlora.split", "vlora.training", "fusion.embedded", "fusion.teachers"),
    "fusion.packing.algorithm",
)
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
WIDTH = 100


def pages() -> dict[Path, str]:
    """File -> text of every page of the reference."""
    index = ["# API reference", "", "`docs/make_reference.py` generates these pages from the docstrings.", ""]
    texts: dict[Path, str] = {}
    for module in MODULES:
        summary = (ast.get_docstring(parse(module)) or "").partition("\n\n")[0].replace("\n", " ")
        index.append(f"* [`{module}`]({module}.md): {summary}")
        texts[FOLDER / f"{module}.md"] = "\n\n".join(filter(None, page(module))) + "\n"
    return {FOLDER / "README.md": "\n".join(index) + "\n", **texts}


def page(module: str) -> Iterator[str]:
    """The parts of a module's page."""
    tree = parse(module)
    yield f"# `{module}`"
    yield prose(tree)
    exported = [node.value for node in tree.body if isinstance(node, ast.Assign) and defined(node) == "__all__"]
    public = ast.literal_eval(exported[0]) if exported else [n for n in map(defined, tree.body) if n and n[0] != "_"]
    for name in public:
        yield f"## `{name}`"
        yield from definition(*find(module, name))


def parse(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def defined(node: ast.stmt) -> str | None:
    """The name that a statement defines."""
    if isinstance(node, ast.ClassDef | FUNCTION):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else 0
    return target.id if isinstance(target, ast.Name) else None


def find(module: str, name: str) -> tuple[ast.stmt, ast.stmt | None, str]:
    """The definition of a module's name, the statement after it, and its module; imports are followed."""
    tree = parse(module)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if defined(node) == name:
            return node, after, module
    for imported in (part for part in ast.walk(tree) if isinstance(part, ast.ImportFrom)):
        for alias in imported.names:
            if name == (alias.asname or alias.name):
                return find(str(imported.module), alias.name)
    raise LookupError(f"{module} defines no {name}")


def definition(node: ast.stmt, after: ast.stmt | None, module: str) -> Iterator[str]:
    """Code and docstring of a function or constant; of a class, those of its public methods too."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
        parts = [part for part in node.body if not as_method(part, module)]
        fields = [ast.unparse(part) for part in parts if isinstance(part, ast.Assign | ast.AnnAssign)]
        methods = [method for part in node.body if (method := as_method(part, module))]
        inside = [*(f for f in fields if f[0] != "_"), *(signature(m) for m in methods if m.name == "__init__")]
        yield code(f"class {node.name}({bases}):" if bases else f"class {node.name}:", *inside)
        yield prose(node)
        for method in methods:
            if method.name == "__init__":
                yield prose(method)
            elif not method.name.startswith("_"):
                yield f"### `{node.name}.{method.name}`"
                yield code(signature(method))
                yield prose(method)
    elif isinstance(node, FUNCTION):
        yield code(signature(node))
        yield prose(node)
    else:
        text = ast.unparse(node)
        yield code(text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ...")
        if isinstance(after, ast.Expr):
            yield prose(ast.Module([after], []))


def as_method(node: ast.stmt, module: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A method of a class as its callers see it, also one that a private function of the module makes: of the function
    below it (`@_asks`), or of another class's method (`generate = _awaited(Client.generate)`). None if it is neither.
    """
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
        maker, method = node.value.func, node.value.args[0]
        if not isinstance(maker, ast.Name) or not isinstance(method, ast.Attribute):
            return None
        owner, _, source = find(module, ast.unparse(method.value))
        assert isinstance(owner, ast.ClassDef)
        made = next(part for part in owner.body if isinstance(part, FUNCTION) and part.name == method.attr)
        made = as_method(made, source) or made
        doc = ast.Expr(ast.Constant(f"As `{ast.unparse(method)}`."))
        made = ast.AsyncFunctionDef(str(defined(node)), made.args, [doc], [], made.returns, lineno=0)
    elif isinstance(node, FUNCTION):
        makers = [part for part in node.decorator_list if ast.unparse(part).startswith("_")]
        if not makers:
            return node
        maker = makers[0]
        made = type(node)(node.name, node.args, node.body, [], node.returns, lineno=0)
        if isinstance(made.returns, ast.Subscript):
            made.returns = made.returns.slice  # T of Call[T]
    else:
        return None
    function, *_ = find(module, ast.unparse(maker))
    assert isinstance(function, FUNCTION) and isinstance(function.returns, ast.Subscript)
    returns = function.returns.slice.elts[-1]  # type: ignore[attr-defined]  # R of Callable[Concatenate[Client, P], R]
    if ast.unparse(returns).startswith("Coroutine"):
        returns = returns.slice.elts[-1]
    if ast.unparse(returns) != "T":
        made.returns = returns
    return made


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = [f"@{text}\n" for text in map(ast.unparse, node.decorator_list)]
    bare = type(node)(node.name, node.args, [ast.Pass()], [], node.returns, lineno=0)
    text = re.sub(r"(?<=[\w\]])=(?!=)", " = ", ast.unparse(bare).partition("\n")[0])
    if len(text) > WIDTH:  # one argument per line
        text = re.sub(r", (?=(\*|\w+(:|=|,|\))))", ",\n    ", text.replace("(", "(\n    ", 1))
        text = re.sub(r"\)(?=( -> .*)?:$)", "\n)", text)
    return "".join(decorators) + text.removesuffix(":")


def code(header: str, *inside: str) -> str:
    """A block of code, with the quotes and the powers of `ruff format` instead of those of `ast.unparse`."""
    lines = [header, *(f"    {line}" for text in inside for line in text.splitlines())]
    lines = [line if '"' in line else re.sub(r"'([^']*)'", r'"\1"', line) for line in lines]
    return "\n".join(["```python", *(re.sub(r"(?<=\d) \*\* (?=\d)", "**", line) for line in lines), "```"])


def prose(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A docstring as Markdown: sections of Google style become lists."""
    text = re.sub(r"^::\n", "", ast.get_docstring(node) or "", flags=re.MULTILINE)
    text = re.sub(r"^(Args|Attributes|Returns|Yields|Raises):\n(?=    )", r"**\1:**\n\n", text, flags=re.MULTILINE)
    head, *sections = re.split(r"^(?=\*\*\w+:\*\*\n)", text, flags=re.MULTILINE)
    for section in sections:
        title, _, body = section.partition("\n\n")
        body = re.sub(r"^    (?! )([\w*]+(?:, [\w*]+)*): ", r"* `\1`: ", body, flags=re.MULTILINE)
        head += f"{title}\n\n{re.sub(r'^ {4,8}', '  ', body, flags=re.MULTILINE)}"
    return head.strip()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for file, written in pages().items():
        file.write_text(written)
