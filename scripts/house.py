"""Measure the structure of the code: `python scripts/house.py [ROOT] [--before PATH]` prints a Markdown table.

Every figure is counted from the source text with `ast` and `tokenize`; nothing of Deft is imported. `--before PATH`
adds a column for another checkout, `--list` names the places behind each figure.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

MAX_FILE_LINES = 600
MAX_PARAMETERS = 8
MAX_PAGE_WORDS = 1500
ALGORITHM_MODULES = {
    "ppo", "grpo", "sac", "td3", "cal_ql", "dsrl", "iql", "cql", "td3_bc", "rebrac", "fql", "sft",
    "decision_transformer", "waypoint_ppo",
}  # fmt: skip
ALGORITHM_NAMES = {
    "ppo", "grpo", "sac", "td3", "cal-ql", "dsrl", "iql", "cql", "td3-bc", "rebrac", "fql", "fql-online", "dt", "sft",
}  # fmt: skip
DIALECT = (
    r"go(?:es|ing)? on\b", r"went on\b", r"tell(?:s|ing)?\b", r"told\b", r"tak(?:e|es|en|ing) over", r"took over",
    r"foresee\w*", r"foresight\w*", r"eyes?\b", r"films?\b", r"shar(?:e|es|ed|ing) out", r"moments\b",
    r"what came of", r"one that is not there", r"is met\b", r"meets? the others", r"part(?:s|ed)? from them",
    r"equali[sz]e\w*", r"settl(?:e|es|ed|ing)\b", r"what it (?:earned|was made of|saw)", r"written down",
    r"places\b", r"refus(?:e|es|ed|ing|al)\b", r"let(?:s)? stand", r"two_?paces", r"whole_moments", r"check_eyes",
)  # fmt: skip
SUPERSEDED = r"(?<![A-Za-z])(?:{})".format("|".join(DIALECT))


@dataclass
class Figure:
    """One row of the table: what is measured, its value, and the places that were counted."""

    name: str
    value: str
    places: list[str] = field(default_factory=list)


@dataclass
class ClassInfo:
    """A class of the package: its file, its syntax tree, the last names of its bases."""

    file: Path
    node: ast.ClassDef

    @property
    def bases(self) -> list[str]:
        """The last names of the bases: `optim.Optimizer` gives `Optimizer`."""
        return [name for base in self.node.bases if (name := last_name(base))]

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """The methods that the class itself defines."""
        return {item.name: item for item in self.node.body if isinstance(item, ast.FunctionDef)}


def last_name(node: ast.expr) -> str:
    """The last identifier of a name, an attribute, a call or a subscript."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return ""


def code_lines(source: str, tree: ast.AST) -> int:
    """Number of lines that hold code: no blank lines, comments or docstrings."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


class House:
    """A checkout of the repository, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "deft"
        if not self.package.is_dir():
            raise SystemExit(f"{root} has no folder deft; give the root of a checkout of Deft")

    @cached_property
    def sources(self) -> dict[Path, str]:
        """The text of every Python file of the package, by its path below the root."""
        return {path.relative_to(self.root): path.read_text() for path in sorted(self.package.rglob("*.py"))}

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        """The syntax tree of every Python file of the package."""
        return {path: ast.parse(source) for path, source in self.sources.items()}

    @cached_property
    def classes(self) -> dict[str, ClassInfo]:
        """Every class of the package by its name, or by file and name where two files use the same name."""
        found: dict[str, ClassInfo] = {}
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[f"{path}:{node.name}" if node.name in found else node.name] = ClassInfo(path, node)
        return found

    def room(self, path: Path) -> str:
        """The folder of the package (or the module, for a file beside the folders) that holds a file."""
        return path.parts[1].removesuffix(".py")

    def ancestors(self, name: str) -> set[str]:
        """The names of all bases of a class, with those that other packages define."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            info = self.classes.get(waiting.pop())
            new = [base for base in info.bases if base not in found] if info else []
            found.update(new)
            waiting.extend(new)
        return found

    def calls(self, path: Path) -> Iterator[ast.Call]:
        """Every call in a file."""
        return (node for node in ast.walk(self.trees[path]) if isinstance(node, ast.Call))

    def imports(self, path: Path) -> set[str]:
        """The modules of Deft that a file imports, wherever in it."""
        names: set[str] = set()
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        known = {module_name(file) for file in self.sources}
        found = set()
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name.startswith("deft."):
                found.add(name)
        return found


def module_name(path: Path) -> str:
    """The dotted name of a module from its path: `deft/runs/compute.py` gives `deft.runs.compute`."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


# ---------------------------------------------------------------------------------------------------------- the figures


def sizes(house: House) -> Iterator[Figure]:
    """Code lines and files, in all and by room; files that are too long."""
    counted = {path: code_lines(source, house.trees[path]) for path, source in house.sources.items()}
    yield Figure("code lines in `deft/` (no blanks, comments, docstrings)", f"{sum(counted.values()):,}")
    yield Figure("files in `deft/`", str(len(counted)))
    rooms: Counter[str] = Counter()
    for path, lines in counted.items():
        rooms[house.room(path) if len(path.parts) > 2 else "modules beside the rooms"] += lines
    for room, lines in sorted(rooms.items()):
        yield Figure(f"… in {room}", f"{lines:,}")
    long = {path: len(source.splitlines()) for path, source in house.sources.items()}
    too_long = [f"{path} ({lines})" for path, lines in long.items() if lines > MAX_FILE_LINES]
    yield Figure(f"files over {MAX_FILE_LINES} lines", str(len(too_long)), too_long)


def run_lifecycles(house: House) -> Iterator[Figure]:
    """Files that lock a run directory and install the stop signals: each is a lifecycle of its own."""
    found = []
    for path in house.sources:
        called = {last_name(call.func) for call in house.calls(path)}
        if "StopSignal" in called and called & {"folder_lock", "directory_lock"}:
            found.append(str(path))
    yield Figure("run lifecycles (files that lock a run directory and install stop signals)", str(len(found)), found)


def policies(house: House) -> Iterator[Figure]:
    """Classes of `models` that act on a TensorDict: each implements a policy's interface anew."""
    found = []
    for name, info in house.classes.items():
        act = info.methods.get("act")
        if act is None or house.room(info.file) != "models" or len(act.args.args) < 2 or act.args.args[1].arg != "td":
            continue
        if not all(isinstance(part, ast.Expr | ast.Raise) for part in act.body):
            found.append(f"{info.file}: {name}")
    yield Figure("kinds of policy (classes that implement `act(td)`)", str(len(found)), found)


def is_settings(house: House, info: ClassInfo) -> bool:
    """Whether a class declares validated settings: it is decorated, but not as a plain `dataclasses.dataclass`."""
    plain = {
        alias.asname or alias.name
        for node in ast.walk(house.trees[info.file])
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        for alias in node.names
    }
    decorated = {last_name(decorator) for decorator in info.node.decorator_list}
    return bool(decorated - plain) or "BaseModel" in info.bases


def field_names(info: ClassInfo) -> list[str]:
    """The fields that a class itself declares."""
    annotated = [item for item in info.node.body if isinstance(item, ast.AnnAssign)]
    return [
        item.target.id
        for item in annotated
        if isinstance(item.target, ast.Name) and last_name(item.annotation) != "ClassVar"
    ]


def configuration(house: House) -> Iterator[Figure]:
    """Settings classes that no other settings class contains or extends; field declarations and distinct names."""
    classes = {name: info for name, info in house.classes.items() if house.room(info.file) == "config"}
    settings = {name: info for name, info in classes.items() if is_settings(house, info)}
    contained: set[str] = set()
    for info in settings.values():
        contained |= set(info.bases)
        for item in info.node.body:
            if isinstance(item, ast.AnnAssign):
                contained |= {part.id for part in ast.walk(item.annotation) if isinstance(part, ast.Name)}
    algorithm = {name for name in settings if "AlgorithmSettings" in house.ancestors(name) | {name}}
    surfaces = [name for name in settings if name not in contained | algorithm and len(field_names(settings[name])) > 2]
    yield Figure("top-level settings classes written by hand", str(len(surfaces)), surfaces)
    declared = [name for info in settings.values() for name in field_names(info)]
    yield Figure("field declarations of settings", str(len(declared)))
    yield Figure("distinct names of settings", str(len(set(declared))))


def environment_loops(house: House) -> Iterator[Figure]:
    """Calls of `env.step` outside `deft/envs`."""
    found = []
    for path in house.sources:
        if house.room(path) in ("envs", "doctor"):
            continue
        for call in house.calls(path):
            receiver = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "step" else None
            if receiver is not None and re.fullmatch(r"_?(?:vector_)?envs?|environment|world", last_name(receiver)):
                found.append(f"{path}:{call.lineno}")
    yield Figure("calls of `env.step` outside `deft/envs`", str(len(found)), found)


def algorithm_questions(house: House) -> Iterator[Figure]:
    """Where training asks which algorithm runs: imports of concrete algorithms, and comparisons with their names."""
    imports, names = [], []
    for path in house.sources:
        if house.room(path) not in ("training", "runs"):
            continue
        for module in sorted(house.imports(path)):
            if module.startswith("deft.algorithms.") and module.rpartition(".")[2] in ALGORITHM_MODULES:
                imports.append(f"{path} → {module}")
        for node in ast.walk(house.trees[path]):
            if isinstance(node, ast.Compare):
                words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                if any(isinstance(word, str) and word in ALGORITHM_NAMES for word in words):
                    names.append(f"{path}:{node.lineno}")
    yield Figure("imports of concrete algorithms in `training`, `runs`", str(len(imports)), imports)
    yield Figure("comparisons with an algorithm's name in `training`, `runs`", str(len(names)), names)


def room_imports(house: House) -> Iterator[Figure]:
    """Import edges between modules of different rooms, and those between training and evaluation."""
    edges: Counter[tuple[str, str]] = Counter()
    for path in house.sources:
        for module in house.imports(path):
            source, target = house.room(path), module.split(".")[1]
            if source != target:
                edges[source, target] += 1
    places = [f"{source} → {target}: {count}" for (source, target), count in sorted(edges.items())]
    yield Figure("import edges between rooms (module to module)", str(sum(edges.values())), places)
    both = (edges["training", "evaluation"], edges["evaluation", "training"])
    yield Figure("imports training → evaluation / evaluation → training", f"{both[0]} / {both[1]}")


def optimizers(house: House) -> Iterator[Figure]:
    """Classes with the interface of an optimizer that are not `torch.optim.Optimizer`."""
    clearing = {"zero_grad", "zero_gradients"}
    found = []
    for name, info in house.classes.items():
        own = {method for parent in {name, *house.ancestors(name)} & house.classes.keys()
               for method in house.classes[parent].methods}  # fmt: skip
        looks_like_one = "step" in own and (own & clearing or name.endswith(("Adam", "Optimizer", "SGD")))
        if looks_like_one and not house.ancestors(name) & {"Optimizer", "Adam", "AdamW", "SGD"}:
            found.append(f"{info.file}: {name}")
    yield Figure("optimizer classes that are not `torch.optim.Optimizer`", str(len(found)), found)


def constructors(house: House) -> Iterator[Figure]:
    """Classes whose `__init__` takes many parameters, and the largest number."""
    counts = {}
    for name, info in house.classes.items():
        if init := info.methods.get("__init__"):
            counts[name] = len(init.args.posonlyargs + init.args.args + init.args.kwonlyargs) - 1
    many = sorted(((count, name) for name, count in counts.items() if count > MAX_PARAMETERS), reverse=True)
    places = [f"{house.classes[name].file}: {name} ({count})" for count, name in many]
    yield Figure(f"constructors with more than {MAX_PARAMETERS} parameters", str(len(many)), places)
    yield Figure("parameters of the largest constructor", str(max(counts.values(), default=0)))


def probes(house: House) -> Iterator[Figure]:
    """Calls of `getattr`, `hasattr` and `inspect` in `models/vla`: optional methods that no base class declares."""
    found = []
    for path in house.sources:
        if path.parts[1:3] != ("models", "vla"):
            continue
        for call in house.calls(path):
            inspected = isinstance(call.func, ast.Attribute) and last_name(call.func.value) == "inspect"
            if inspected or (isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")):
                found.append(f"{path}:{call.lineno}")
    yield Figure("`getattr`, `hasattr` and `inspect` probes in `models/vla`", str(len(found)), found)


def tests(house: House) -> Iterator[Figure]:
    """Modules of the package without a test file at the mirrored path."""
    found = []
    for path, tree in house.trees.items():
        if path.name in ("__init__.py", "__main__.py") or not tree.body:
            continue
        mirrored = house.root / "tests" / Path(*path.parts[1:-1]) / f"test_{path.name}"
        if not mirrored.is_file():
            found.append(str(path))
    yield Figure("modules without a mirrored test file", str(len(found)), found)


def pages(house: House) -> Iterator[Figure]:
    """Pages of the documentation, and those that are too long."""
    words = {path.relative_to(house.root): page_words(path) for path in sorted((house.root / "docs").rglob("*.md"))}
    long = [f"{path} ({count})" for path, count in words.items() if count > MAX_PAGE_WORDS]
    yield Figure("pages in `docs/`", str(len(words)))
    yield Figure(f"pages in `docs/` over {MAX_PAGE_WORDS:,} words", str(len(long)), long)


def page_words(path: Path) -> int:
    """Words of a page as `wc -w` counts them."""
    return len(path.read_text().split())


def dialect(house: House) -> Iterator[Figure]:
    """Words that the style guide replaces, by room: in text, comments and identifiers."""
    counts: Counter[str] = Counter()
    places: dict[str, list[str]] = {}
    texts = {house.room(path): [] for path in house.sources}
    for path, source in house.sources.items():
        texts[house.room(path)].append((path, source))
    for folder, pattern in {"docs": "*.md", "tests": "*.py", "benchmarks": "*.py"}.items():
        files = sorted((house.root / folder).rglob(pattern))
        texts[f"{folder}/"] = [(path.relative_to(house.root), path.read_text()) for path in files]
    readme = house.root / "README.md"
    texts["README.md"] = [(Path("README.md"), readme.read_text())] if readme.is_file() else []
    for room, files in texts.items():
        for path, text in files:
            for number, line in enumerate(text.splitlines(), 1):
                for match in re.finditer(SUPERSEDED, line, re.IGNORECASE):
                    counts[room] += 1
                    places.setdefault(room, []).append(f"{path}:{number}: {match[0]}")
    inside = sum(count for room, count in counts.items() if "/" not in room and room != "README.md")
    yield Figure("superseded words in `deft/`", str(inside))
    for room in sorted(counts):
        yield Figure(f"… in {room}", str(counts[room]), places[room])


MEASURES = (
    sizes, run_lifecycles, policies, configuration, environment_loops, algorithm_questions, room_imports, optimizers,
    constructors, probes, tests, pages, dialect,
)  # fmt: skip


def measure(root: Path) -> list[Figure]:
    """Every figure of a checkout, in the order of the table."""
    house = House(root)
    return [figure for measure_one in MEASURES for figure in measure_one(house)]


def keyed(figures: list[Figure]) -> dict[tuple[str, str], Figure]:
    """The figures by their name and, for a row "… in ROOM", the row that it details."""
    found, heading = {}, ""
    for figure in figures:
        heading = heading if figure.name.startswith("…") else figure.name
        found[heading, figure.name] = figure
    return found


def table(now: list[Figure], before: list[Figure] | None = None) -> str:
    """The figures as a Markdown table, with a column for the earlier checkout if there is one."""
    columns = {"now": keyed(now)} if before is None else {"before": keyed(before), "now": keyed(now)}
    keys = list(dict.fromkeys(key for heading in keyed(now) for key in (heading,)))
    if before is not None:  # rows that only the earlier checkout has stand after their heading's rows
        for key in keyed(before):
            if key not in keys:
                same = [index for index, other in enumerate(keys) if other[0] == key[0]]
                keys.insert(same[-1] + 1 if same else len(keys), key)
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for key in keys:
        cells = [figures[key].value if key in figures else "0" for figures in columns.values()]
        lines.append(f"| {key[1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure the structure of Deft's code.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="Checkout to measure.")
    parser.add_argument("--before", type=Path, metavar="PATH", help="Print a second column for this checkout.")
    parser.add_argument("--list", action="store_true", help="Name the places behind each figure.")
    options = parser.parse_args(arguments)
    figures = measure(options.root)
    print(table(figures, measure(options.before) if options.before else None))
    if options.list:
        for figure in filter(lambda one: one.places, figures):
            print(f"\n## {figure.name}: {figure.value}\n")
            print("\n".join(f"- {place}" for place in figure.places))
    return 0


if __name__ == "__main__":
    sys.exit(main())
