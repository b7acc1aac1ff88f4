"""Packages import only downwards, and the public API is documented and annotated."""

import ast
import functools
import inspect
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import fshard
from tests.helpers.folding import Figures, figures

PACKAGE = Path(fshard.__file__).parent
ROOT = Path(__file__).parents[1]
MODULES = sorted(PACKAGE.rglob("*.py"))

# Single modules below all packages, such as fshard/errors.py.
GROUND = {
    "ambient",
    "arguments",
    "copying",
    "errors",
    "foreign_names",
    "torch_collectives",
    "randomness",
    "source",
    "tables",
    "uncompiled",
    "rounding",
}
# package -> the packages it may import, besides itself. `fshard` is fshard/__init__.py.
MAY_IMPORT = {
    "ambient": set(),
    "arguments": {"errors"},
    "errors": set(),
    "source": {"ambient", "errors"},
    "foreign_names": set(),
    "torch_collectives": {"errors", "source"},
    "randomness": set(),
    "tables": set(),
    "rounding": set(),
    "uncompiled": set(),
    "copying": {"errors"},
    "mesh": GROUND,
    "array": GROUND | {"mesh"},
    "tensor": GROUND
    | {
        "mesh",
        "array",
        "transforms",
        "pipeline",
        "experts",
    },  # a plan runs a module on arrays in a step
    "memory": GROUND | {"mesh"},
    "optim": GROUND | {"mesh", "memory"},
    "transforms": GROUND
    | {"mesh", "memory", "optim", "pipeline"},  # a training step is a gradient and an optimizer
    "pipeline": GROUND | {"mesh"},
    "comm": GROUND | {"mesh", "optim", "transforms"},
    "experts": GROUND | {"mesh"},
    "parallelism": GROUND
    | {"mesh", "transforms", "optim", "pipeline", "tensor", "experts"},  # it builds a step's parts
    "nn": {"transforms", "experts"},
    "booster": GROUND
    | {
        "mesh",
        "memory",
        "transforms",
        "optim",
        "comm",
        "pipeline",
        "tensor",
        "checkpoint",
        "auditing",  # it compares replicas after each step
        "parallelism",
    },
    "checkpoint": GROUND | {"mesh", "transforms", "optim", "pipeline"},
    "refit": GROUND | {"mesh", "checkpoint", "transforms"},
    "recovery": GROUND | {"mesh", "checkpoint", "transforms"},
    "auditing": GROUND | {"mesh", "optim", "transforms", "checkpoint"},
    "launching": GROUND | {"mesh"},
    "explore": GROUND
    | {
        "mesh",
        "transforms",
        "optim",
        "pipeline",
        "parallelism",
        "plan",
    },  # a page shows the cost of a plan
    "laboratory": GROUND
    | {
        "mesh",
        "optim",
        "transforms",
        "pipeline",
        "tensor",
        "parallelism",
        "booster",
        "plan",
        "explore",
        "testing",
        "fshard",
    },  # a page on which the layouts of a step are changed
    "report": GROUND | {"mesh"},
    "testing": GROUND
    | {"mesh", "launching", "transforms", "optim", "pipeline", "fshard"},  # it uses the public API
    "doctor": GROUND | {"mesh", "memory", "launching", "testing", "fshard"},
    "plan": GROUND
    | {
        "mesh",
        "memory",
        "optim",
        "transforms",
        "pipeline",
        "tensor",
        "parallelism",
        "experts",
        "launching",
        "recovery",
    },  # plans are of all of these
    "command": {
        "arguments",
        "errors",
        "auditing",
        "launching",
        "doctor",
        "checkpoint",
        "testing",
        "plan",
        "explore",
        "laboratory",
    },  # the command line
    "__main__": {"command"},
    "fshard": GROUND
    | {
        "mesh",
        "array",
        "auditing",
        "launching",
        "memory",
        "transforms",
        "optim",
        "pipeline",
        "booster",
        "checkpoint",
        "comm",
        "experts",
        "explore",
        "recovery",
        "refit",
        "report",
        "nn",
        "parallelism",
        "tensor",
    },
}


# How folded the code of each package is: nodes, dense, choices, pairs, wide, reasons. See the test
# below, and `tests/helpers/folding.py`. "fshard" has the files beside the packages.
FOLDED = {
    "fshard": Figures(13, 9.4, 51.6, 0, 0, 13.9),
    "array": Figures(15, 4.4, 48.5, 0, 1.1, 26.9),
    "auditing": Figures(14, 6.3, 39.1, 6.3, 1.2, 4.6),
    "booster": Figures(14, 5.7, 40.3, 2.8, 5.1, 12.7),
    "checkpoint": Figures(15, 3.5, 23.3, 0.5, 3.0, 24.8),
    "comm": Figures(15, 0, 34.6, 0, 0, 12.4),
    "doctor": Figures(14, 0, 47.5, 0, 0, 4.4),
    "experts": Figures(16, 3.9, 27.3, 0, 0, 19.8),
    "explore": Figures(16, 5.3, 51.6, 1.3, 0, 7.8),
    "laboratory": Figures(15, 5.2, 27.6, 0, 0.6, 12.9),
    "launching": Figures(13, 0, 24.6, 0, 1.1, 16.5),
    "memory": Figures(14, 3.4, 23.6, 0, 0.3, 17.6),
    "mesh": Figures(14, 5.0, 32.6, 0.5, 0.3, 29.7),
    "optim": Figures(15, 7.1, 57.4, 0, 0.3, 9.2),
    "parallelism": Figures(16, 3.2, 94.6, 0, 2.0, 15.2),
    "pipeline": Figures(14, 7.1, 33.8, 1.3, 1.8, 20.2),
    "plan": Figures(15, 5.7, 28.2, 1.0, 3.3, 21.0),
    "recovery": Figures(14, 0, 24.0, 0, 3.5, 20.0),
    "refit": Figures(15, 0, 19.3, 0, 0, 13.3),
    "report": Figures(14, 9.6, 52.6, 0, 1.6, 6.4),
    "tensor": Figures(16, 9.1, 44.6, 0, 1.5, 15.2),
    "testing": Figures(16, 5.6, 24.1, 0, 1.8, 9.2),
    "transforms": Figures(14, 5.9, 34.7, 2.0, 4.7, 19.2),
    "tests": Figures(19, 10.6, 29.1, 1.5, 3.2, 6.4),
}


class Import(NamedTuple):
    line: int
    module: str  # absolute: `from fshard.mesh import P` is "fshard.mesh.P"


def imports(source: str, package: str) -> Iterator[Import]:
    """Yield all imports, those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(node.lineno, f"{start}.{alias.name}") for alias in node.names)


def package_of(module: str, packages: set[str]) -> str:
    """Return the package of a module; other names are those of fshard/__init__.py."""
    _, _, inside = module.partition(".")
    package = inside.split(".")[0]
    return package if package in packages else "fshard"


def violations(files: dict[str, str]) -> list[str]:
    """List the imports that MAY_IMPORT forbids, in `files`: path inside the package -> source."""
    actual: list[str] = []
    present = {Path(path).parts[0].removesuffix(".py") for path in files} - {"__init__"}
    packages = present | set(MAY_IMPORT)
    for path, source in files.items():
        folder = ".".join(["fshard", *Path(path).parts[:-1]])
        package = package_of(f"fshard.{Path(path).parts[0].removesuffix('.py')}", packages)
        if package not in MAY_IMPORT:
            actual.append(f"fshard/{path}: the package `{package}` is not in the table MAY_IMPORT")
            continue
        for line, module in imports(source, folder):
            if module.split(".")[0] != "fshard":
                continue
            target = package_of(module, packages)
            if target != package and target not in MAY_IMPORT[package]:
                actual.append(
                    f"fshard/{path}:{line}: `{package}` may not import `{module}` (package `{target}`)"
                )
    return actual


def test_packages_import_only_downwards():
    files = {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in MODULES
    }
    actual = violations(files)
    assert not actual, "\n" + "\n".join(actual)


def test_folders_have_at_most_16_files():
    counts = Counter(path.parent for path in [*MODULES, *Path(__file__).parent.rglob("*.py")])
    assert {folder: count for folder, count in counts.items() if count > 16} == {}


def test_tests_mirror_the_packages():
    """A folder of tests is of a package, of a module that has many, or of the examples."""
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("*.py")}
    strangers = []
    for folder in folders:
        is_package = (PACKAGE / folder).is_dir()
        is_module = (PACKAGE / folder).with_suffix(".py").is_file()
        is_beside = folder.name in ("helpers", "scripts", "examples")
        if not is_beside and not is_package and not is_module:
            strangers.append(str(folder))
    assert strangers == []


def test_tests_import_only_helpers():
    """A module that several files of tests need has no `test_` in its name."""
    wrong = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for line, module in imports(path.read_text(encoding="utf-8"), "tests"):
            if module.startswith("tests.") and ".test_" in module:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


@pytest.mark.parametrize("package", FOLDED)
def test_code_is_not_folded_more_than_it_was(package):
    """The figures of a package, with room of a tenth: see `tests/helpers/folding.py`.

    They are symptoms. A figure that grew with code that reads well is raised in the table.
    """
    if package == "tests":
        paths = [*(ROOT / "tests").rglob("*.py")]
    elif package == "fshard":
        paths = [*PACKAGE.glob("*.py")]
    else:
        paths = [*(PACKAGE / package).rglob("*.py")]
    allowed = FOLDED[package]
    actual = figures(paths)
    room = 1.1
    worse = []
    for name, limit in allowed._asdict().items():
        value = getattr(actual, name)
        is_worse = value < limit / room - 0.5 if name == "reasons" else value > limit * room + 0.5
        if is_worse:
            worse.append(f"{name} {value:.1f}, from {limit}")
    assert not worse, f"{package}: {'; '.join(worse)}"


def test_import_table_has_no_cycle():
    below = {package: set(allowed) for package, allowed in MAY_IMPORT.items()}
    while ready := {package for package, allowed in below.items() if not allowed}:
        below = {
            package: allowed - ready for package, allowed in below.items() if package not in ready
        }
    assert not below, f"these packages import each other: {sorted(below)}"


# The layers of fshard/mesh, from the bottom up. A module is in the layer of its longest prefix.
MESH_LAYERS = (
    ("layout",),  # meshes, specs, layouts, trees
    (
        "collectives.moves",
        "collectives.ledger",
        "reshard.exchange",
        "reshard.regions",
    ),  # collectives as data
    ("spmd.scope", "spmd.moments"),  # the device that code runs as, and the phases it reaches
    ("runtimes", "shared_memory", "collectives.delivery"),  # worlds and transports
    ("collectives.autograd",),  # collectives as autograd Functions
    ("spmd.check_equal",),
    ("collectives",),  # collectives on trees
    ("spmd",),  # a function on every device
    ("layout.sharded", "layout.make", "layout.dtensor", "collectives.on_shards"),  # global arrays
    ("spmd.outer_autograd", "spmd.captured"),
    ("reshard",),
    ("spmd.shard_map", "spmd.call_plan", "spmd.gradient_audit"),
    ("",),  # fshard.mesh itself
)


def mesh_layer(module: str) -> int:
    """Return the layer of a module of fshard.mesh."""
    name = module.removeprefix("fshard.mesh").removeprefix(".")
    layers: dict[str, int] = {}
    for layer, prefixes in enumerate(MESH_LAYERS):
        for prefix in prefixes:
            if prefix in ("", name) or name.startswith(f"{prefix}."):
                layers[prefix] = layer
    return layers[max(layers, key=len)]


def test_imports_inside_mesh_point_downwards():
    names = {module_name(path): path for path in MODULES}
    actual: list[str] = []
    for name, path in names.items():
        if name.startswith("fshard.mesh"):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            for line, target in imports(path.read_text(encoding="utf-8"), package):
                target = target if target in names else target.rpartition(".")[0]
                if target.startswith("fshard.mesh") and mesh_layer(target) > mesh_layer(name):
                    actual.append(f"{name}:{line} imports {target}")
    assert actual == []


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(["fshard", *parts]).removesuffix(".__init__")


def test_modules_have_no_import_cycle():
    names = {module_name(path): path for path in MODULES}
    below: dict[str, set[str]] = {}
    for name, path in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        below[name] = set()
        for _, target in imports(path.read_text(encoding="utf-8"), package):
            module = target if target in names else target.rpartition(".")[0]
            if module in names and module != "fshard":
                below[name].add(module)

    # Take away the modules that import nothing of what is left, until only circles are,
    while ready := {name for name, lower in below.items() if not lower}:
        below = {name: lower - ready for name, lower in below.items() if name not in ready}
    # and those that nothing imports, so that the error names the modules of the circles alone.
    while unused := {*below} - set().union(*below.values()):
        below = {name: lower for name, lower in below.items() if name not in unused}
    assert below == {}


def nodes(kind: type | tuple[type, ...], text: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of a kind of all modules, or of those that have a text: parsing is slow."""
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        if text not in source:
            continue
        tree = ast.parse(source)
        yield from ((module_name(path), node) for node in ast.walk(tree) if isinstance(node, kind))


def test_facts_of_a_thread_are_those_that_ambient_lists():
    """A fact changes results without being an argument: see docs/decisions/045."""
    text = (PACKAGE / "ambient.py").read_text(encoding="utf-8")
    listed = set(re.findall(r"^    \w.* (\w+(?:/\w+)+\.py)$", text, re.MULTILINE))
    own_concerns = {
        "memory/activations.py",  # copies that are on their way to the host
        "memory/state.py",  # where optimizer state is updated
        "optim/norms.py",  # how a norm adds, and the arrays of a device
        "pipeline/split/block_stage.py",  # the run of a stage, in the module that it replaces
    }
    makes_state = re.compile(r"\bContextVar\(|ContextVar\[.*\] = |threading\.local\b")
    setters = set()
    for path in MODULES:
        if makes_state.search(path.read_text()):
            setters.add(path.relative_to(PACKAGE).as_posix())
    assert len(listed) <= 5
    assert setters == listed | own_concerns


def test_type_names_are_unique():
    counts = Counter(node.name for _, node in nodes(ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


# What is ours is found by its type. Names that other libraries give are felt for, in these files.
FELT_FOR = {
    "checkpoint/foreign/export.py": "transformers and peft: config, save_pretrained",
    "checkpoint/names.py": "torch's state_dict, named tuples, joined_dim of classes made at run time",
    "checkpoint/save.py": "Python: the last error of a thread",
    "memory/limit.py": "torch: __torch_dispatch__, which its stubs annotate wrongly",
    "plan/program.py": "transformers: layers of experts",
    "testing/certify_command.py": "Python: notes of errors",
    "testing/plugin.py": "pytest and Python: fixtures, notes of errors",
    "testing/programs/precision.py": "torch: the modules of its functions",
    "testing/programs/record.py": "transformers: the loss of an output",
    "testing/programs/uses.py": "torch: reads of attributes",
    "testing/scripts/loaders.py": "torch: the fetcher of a loader; named tuples",
    "testing/scripts/watch.py": "torch: reads of attributes, wrappers of modules",
}


def test_what_is_ours_is_found_by_its_type():
    """In these packages no hasattr and no getattr has a constant name, but in adapters."""
    packages = ("plan", "comm", "memory", "checkpoint", "testing")
    lines = dict[str, list[int]]()
    for path in MODULES:
        file = path.relative_to(PACKAGE).as_posix()
        if file.partition("/")[0] not in packages:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(ast.Name("hasattr" | "getattr"), [_, ast.Constant(), *_]):
                    lines.setdefault(file, []).append(node.lineno)
                case _:
                    pass
    unexplained = {file: rows for file, rows in lines.items() if file not in FELT_FOR}
    assert unexplained == {}
    assert [file for file in FELT_FOR if file not in lines] == []


def test_no_docstring_begins_with_what():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented_nodes = nodes(documented, text="What ")
    texts = [(module, ast.get_docstring(node) or "") for module, node in documented_nodes]
    for module, node in nodes(ast.Expr, text="What "):
        if isinstance(node.value, ast.Constant):
            texts.append((module, str(node.value.value)))
    assert [text for _, text in texts if text.startswith("What ")] == []


def banned_words() -> set[str]:
    """Read the first column of the glossary's table of words that are not used."""
    table = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").partition("| not | but |")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    words = ",".join(rows[: rows.index(" concept ")]).split(",")
    return {word.strip() for word in words}


def prose_and_names(path: Path) -> Iterator[str]:
    """Yield docstrings without doctests and quoted code, comments, and the names that a module
    defines.
    """
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield re.sub(r"`[^`]*`", "", text.partition(">>>")[0])
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def words_of(text: str) -> set[str]:
    """Return the words of a text, and the parts of its names."""
    return {word.lower() for word in re.findall(r"[A-Za-z][a-z]*", text)}


def test_library_has_no_banned_word():
    banned = banned_words()
    assert {"whole", "told", "lies"} <= banned
    actual = set()
    for path in MODULES:
        # Most files have none of them, not in their code either, and need not be parsed.
        if not banned.intersection(words_of(path.read_text(encoding="utf-8"))):
            continue
        for text in prose_and_names(path):
            for word in banned.intersection(words_of(text)):
                actual.add(f"{path.relative_to(ROOT)}: {word}")
    assert sorted(actual) == []


# The public API.


@functools.cache
def attribute_docstrings() -> dict[str, str]:
    """Collect the strings below `NAME = value`: the docstrings of constants and aliases."""
    actual: dict[str, str] = {}
    for path in MODULES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for assignment, below in pairwise(body):
            match assignment, below:
                case (
                    ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(ast.Constant(str(text))),
                ):
                    actual[name] = text
    return actual


def docstring(name: str) -> str:
    """Return the written docstring of a public name, not a generated one."""
    value = getattr(fshard, name)
    if name in (attributes := attribute_docstrings()):
        return attributes[name]
    if inspect.isclass(value):
        own = vars(value).get("__doc__") or ""
        return "" if own.startswith(f"{value.__name__}(") else own
    own = getattr(value, "__doc__", None) or ""
    return "" if own == type(value).__doc__ else own


def unannotated(function: object) -> list[str]:
    """List the parameters that have no annotation, and "return"."""
    signature = inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    return names + ["return"] * (signature.return_annotation is signature.empty)


def public_groups() -> dict[str, list[str]]:
    """Collect the names of `__all__` below each comment, which is the title of a group."""
    source = (PACKAGE / "__init__.py").read_text(encoding="utf-8").partition("__all__ = [")[2]
    groups: dict[str, list[str]] = {}
    title = ""
    for line in source.partition("]")[0].splitlines():
        if comment := re.fullmatch(r"\s*# (.+)", line):
            title = comment[1]
        elif name := re.fullmatch(r'\s*"(\w+)",', line):
            groups.setdefault(title, []).append(name[1])
    return groups


def test_public_names_exist_in_groups_of_at_most_16():
    """A reader finds a name by its group, and sees a group at a glance."""
    groups = public_groups()
    assert [*chain.from_iterable(groups.values())] == fshard.__all__
    assert len(fshard.__all__) == len(set(fshard.__all__))
    assert [name for name in fshard.__all__ if not hasattr(fshard, name)] == []
    assert "" not in groups
    assert {title: len(names) for title, names in groups.items() if len(names) > 16} == {}


def test_every_public_name_has_a_docstring():
    assert [name for name in fshard.__all__ if not docstring(name).strip()] == []


def test_every_public_function_is_annotated():
    public = [(name, getattr(fshard, name)) for name in fshard.__all__]
    missing = {name: unannotated(value) for name, value in public if inspect.isroutine(value)}
    assert {name: names for name, names in missing.items() if names} == {}


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, list[str]]:
    """Import torch, then fshard, in a new interpreter; return what is there then."""
    code = """
import json, sys, torch
before = set(sys.modules)
import fshard
facts = {
    "modules": [*sys.modules],
    "new": [*set(sys.modules) - before],
    "dir": dir(fshard),
    "all": fshard.__all__,
}
print(json.dumps(facts))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_takes_few_modules_beside_those_of_torch(fresh_import):
    """The bound of the time to import, a quarter of torch's, without a clock.

    A package on top of the core is imported when a name of it is first used.
    """
    assert len(fresh_import["new"]) <= 300


def test_names_that_are_imported_on_first_use_are_those_that_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {}
    for statement in chain.from_iterable(block.body for block in blocks):
        for alias in statement.names:
            seen[alias.name] = statement.module
    namespaces = {name for name, module in seen.items() if module == "fshard"}
    assert namespaces == {*fshard._NAMESPACES} - {"plan", "testing"}
    assert {name: seen[name] for name in seen.keys() - namespaces} == fshard._MODULES


def test_names_that_are_imported_on_first_use_are_listed_before(fresh_import):
    """Jupyter completes the names of `dir`."""
    assert {*fresh_import["all"]} <= {*fresh_import["dir"]}


def test_import_skips_slow_modules(fresh_import):
    slow = {"torch.distributed.tensor", "rich"}
    assert slow.isdisjoint(fresh_import["modules"])
