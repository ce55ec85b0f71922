"""The shape of the package, read from its source: who may import whom, and who may touch the world.

Imports for type checkers count like all others: a type is a dependency too.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import qwen3_asgi

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(qwen3_asgi.__file__).parent
TESTS = Path(__file__).parent

BASE = {"config", "errors"}
BELOW_THE_DOORS = BASE | {"scheduler", "metrics", "tiny", "text", "engine", "openai", "asgi"}
# Folder or module -> what it may import, itself aside. From the bottom to the top.
MAY_IMPORT = {
    "errors": set[str](),
    "config": {"errors"},
    "scheduler": BASE,
    "metrics": BASE | {"scheduler"},
    "model": BASE | {"scheduler"},
    "tiny": BASE,
    "text": BASE,
    "engine": BASE | {"text", "scheduler", "metrics", "tiny"},
    "openai": BASE | {"text", "engine", "scheduler"},
    "asgi": BASE | {"openai", "engine", "text", "metrics", "scheduler"},
    "app": BELOW_THE_DOORS,
    "middleware": BELOW_THE_DOORS,
    "testing": BELOW_THE_DOORS | {"app", "middleware"},
    "bench": BELOW_THE_DOORS | {"app", "middleware", "testing"},
    "cli": BELOW_THE_DOORS | {"app", "middleware", "testing", "bench"},
}
# The model brings torch along, so these import it inside a function, when an engine is built.
MAY_IMPORT_LAZILY = {"engine": {"model"}, "testing": {"model"}, "bench": {"model"}}

# The bundled model was made with torch; nothing else may need what made it.
TRAINING = {"qwen3_asgi.tiny.train", "qwen3_asgi.tiny.evaluate", "qwen3_asgi.tiny.batches"}

# Files of more than `MAX_LINES` lines, each with its reason.
MAX_LINES = 400
LONG_FILES: dict[str, str] = {}


class Import(NamedTuple):
    """One imported module, with the name taken from it."""

    module: str
    name: str | None
    line: int
    in_function: bool


def part_of(path: Path) -> str:
    """The folder below the package, or the module beside it; the package's own file is "" ."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


@cache
def source_files() -> tuple[Path, ...]:
    return tuple(sorted(ROOT.rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    """The dotted name of a module; of a package, its `__init__`."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    return tuple(walk(tree_of(path), name_of(path).split(".")))


def walk(node: ast.AST, here: list[str], *, in_function: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, None, child.lineno, in_function)
        elif isinstance(child, ast.ImportFrom):
            base = here[: -child.level] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, in_function)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, here, in_function=in_function or function)


def target_of(found: Import) -> str | None:
    """The part of this package that is imported; None for other packages."""
    module = found.module.split(".")
    if module[0] != "qwen3_asgi":
        return None
    if len(module) > 1:
        return module[1]
    return found.name if found.name in MAY_IMPORT else ""


def ours() -> Iterator[tuple[Path, Import, str]]:
    """Every import of one part of this package by another."""
    for path in source_files():
        for found in imports_of(path):
            target = target_of(found)
            if target is not None and target != part_of(path):
                yield path, found, target


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT.parent)}:{line}"


def test_every_part_has_its_place_in_the_layers() -> None:
    parts = {part_of(path) for path in source_files()} - {""}
    assert parts <= set(MAY_IMPORT)


def test_imports_point_downwards_only() -> None:
    wrong = []
    for path, found, target in ours():
        part = part_of(path)
        if part == "" or (target == "" and only_asks_for_the_version(path, found)):
            continue
        allowed = MAY_IMPORT[part]
        if found.in_function:
            allowed = allowed | MAY_IMPORT_LAZILY.get(part, set())
        if target not in allowed:
            wrong.append(f"{where(path, found.line)} imports {target or 'the public names'}")
    assert wrong == []


def only_asks_for_the_version(path: Path, found: Import) -> bool:
    if found.name is not None:
        return found.name == "__version__"
    asked = {
        node.attr
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "qwen3_asgi"
    }
    return asked <= {"__version__"}


def test_package_itself_imports_its_parts_for_type_checkers_only() -> None:
    body = tree_of(ROOT / "__init__.py").body
    modules = [node.module for node in body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    assert [name for name in [*modules, *names] if (name or "").startswith("qwen3_asgi")] == []


def test_parts_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path, _, target in ours():
        if target and part_of(path):
            graph.setdefault(part_of(path), set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {error.args[1]}")


def test_scheduler_needs_the_standard_library_only() -> None:
    wrong = [
        f"{where(path, found.line)} imports {package}"
        for path, found, package in third_party("scheduler")
    ]
    assert wrong == []


def third_party(*parts: str) -> Iterator[tuple[Path, Import, str]]:
    """What the given parts (all, if none is given) import from other packages."""
    for path in source_files():
        if not parts or part_of(path) in parts:
            for found in imports_of(path):
                package = found.module.split(".")[0]
                if package not in sys.stdlib_module_names | {"qwen3_asgi"}:
                    yield path, found, package


def test_torch_lives_in_the_model_only() -> None:
    wrong = [
        f"{where(path, found.line)} imports {found.module}"
        for path, found, package in third_party()
        if package == "torch" and part_of(path) != "model" and name_of(path) not in TRAINING
    ]
    assert wrong == []


def test_nothing_needs_what_made_the_bundled_model() -> None:
    wrong = [
        f"{where(path, found.line)} imports {found.module}"
        for path in source_files()
        if name_of(path) not in TRAINING
        for found in imports_of(path)
        if found.module in TRAINING or f"{found.module}.{found.name}" in TRAINING
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("part", "banned"),
    [
        ("text", {"starlette", "prometheus_client"}),
        ("openai", {"starlette", "prometheus_client", "transformers"}),
        ("engine", {"starlette", "transformers"}),
        ("metrics", {"starlette"}),
        ("model", {"starlette", "prometheus_client"}),
    ],
)
def test_part_does_without_packages_of_other_parts(part: str, banned: set[str]) -> None:
    wrong = [
        f"{where(path, found.line)} imports {found.module}"
        for path, found, package in third_party(part)
        if package in banned
    ]
    assert wrong == []


def test_nothing_private_is_imported_from_another_part() -> None:
    private = [
        f"{where(path, found.line)} imports {found.name}"
        for path, found, _ in ours()
        if (found.name or "").startswith("_") and not (found.name or "").endswith("__")
    ]
    assert private == []


def touches_the_world(node: ast.AST) -> str | None:
    match node:
        case ast.Call(func=ast.Name(id="print")):
            return "prints"
        case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "environb" | "getenv"):
            return "reads the environment"
        case ast.ImportFrom(module="os", names=names) if {alias.name for alias in names} & {
            "environ",
            "environb",
            "getenv",
        }:
            return "reads the environment"
    return None


def test_only_the_command_line_prints_and_reads_the_environment() -> None:
    wrong = [
        f"{where(path, getattr(node, 'lineno', 0))} {what}"
        for path in source_files()
        if part_of(path) not in ("cli", "bench")
        for node in ast.walk(tree_of(path))
        if (what := touches_the_world(node))
    ]
    assert wrong == []


def test_files_are_short_enough_to_read_in_one_sitting() -> None:
    lengths = {
        str(path.relative_to(ROOT.parent)): len(path.read_text().splitlines())
        for path in [*source_files(), *sorted(TESTS.rglob("*.py"))]
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert {name: too_long[name] for name in too_long if name not in LONG_FILES} == {}
    assert set(LONG_FILES) <= set(too_long), "listed, but short by now"
