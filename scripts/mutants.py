"""Mutation check: the share of small changes to the code that the tests notice.

One process collects the tests and records which statements each of them executes. For each mutant it forks: the child
replaces the code of the function, and runs the tests that execute the changed statement, the quickest first, until one
fails. For a mutant of what is executed at import (constants, defaults, class bodies) the child imports all modules
of the project anew, and collects the tests again.

The sample is drawn from all mutants, also from those in statements that no test executes. A mutant counts as killed
when the same test fails twice and passes without the mutant, or when the tests end only without it.

mutmut 3 and cosmic-ray collect the tests anew for each mutant, which takes seconds here, and draw no sample by a seed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import gc
import importlib
import importlib.machinery
import itertools
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import gevent.os
import hypothesis
import pytest

IN_PROCESS = ["tests/properties", "tests/conformance"]
OF_HUBS = [f"tests/hub/test_{name}.py" for name in ("documented_forms", "hub", "objects", "statements")]
OF_CONNECTIONS = [
    *("connection", "handshake", "last_values", "persist_file", "publish_limits", "receivers", "session_migration"),
    *("slow_consumer_policies", "slow_consumers"),
]
STORAGE = [
    *("arrow", "columns", "commit", "committed", "compact", "durability", "files", "manifest", "parquet_files"),
    *("record", "recorder", "recovery", "retention", "segment", "verification", "writer"),
]
"""The modules of the journal that write, read and check its files."""
OF_STORAGE = [
    *("arrow", "checksums", "columns", "commit", "committed", "compact", "damage", "delivery_of_results"),
    *("durability", "files", "formats", "jumping_clock", "locations", "manifest", "merge", "moved_folder"),
    *("old_journal", "parquet_files", "power_failure", "reader", "record", "recorder", "recovery", "readers"),
    *("retention", "segment", "staged", "timestamps", "two_hubs", "unmounted", "verification", "writer"),
]
"""Tests of these modules that are quick and start no other processes."""
GROUPS = {
    "broker": (
        ["smqrt/broker"],
        ["tests/broker", *IN_PROCESS, *OF_HUBS, *(f"tests/smq/test_{name}.py" for name in OF_CONNECTIONS)],
    ),
    "wire": (
        ["smqrt/wire"],
        ["tests/wire", "tests/conformance", "tests/properties/test_kernels.py", "tests/properties/test_splits.py"],
    ),
    "journal": (
        [f"smqrt/journal/{name}.py" for name in STORAGE],
        [f"tests/journal/test_{name}.py" for name in OF_STORAGE],
    ),
}
"""Name: (sources, tests)."""
EQUIVALENT = Path(__file__).with_suffix(".equivalent")
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
MEMORY_BYTES = 8 << 30
SPARE_S = 20
"""What a mutant's tests get on top of six times what they took without it; more when they need more without it."""
COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    path: str
    number: int  # among the mutants of the file
    line: int
    statement: int
    """The line where the innermost statement begins; 0 when it is executed at import."""
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def unchanged(path: str) -> Mutant:
    """Return what stands for the file without a mutant."""
    return Mutant(path, -1, 0, 0, "")


class Mutator(ast.NodeTransformer):
    """Numbers the mutants of a file, and applies one of them."""

    def __init__(self, path: str, wanted: int = -1) -> None:
        self.path, self.wanted = path, wanted
        self.mutants: list[Mutant] = []
        self.functions = 0  # how deep
        self.statement = 0

    def offer(self, old: ast.AST, *variants: ast.AST) -> ast.AST:
        """Count the variants of a node; return the one that is wanted, or the node."""
        chosen = old
        for new in variants:
            if len(self.mutants) == self.wanted:
                chosen = ast.copy_location(new, old)
            before, after = (" ".join(ast.unparse(ast.fix_missing_locations(node)).split()) for node in (old, new))
            statement = self.statement if self.functions else 0
            self.mutants.append(Mutant(self.path, len(self.mutants), old.lineno, statement, f"{before} -> {after}"))  # type: ignore[attr-defined]
        return chosen

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.stmt):
            return super().visit(node)
        outer, self.statement = self.statement, node.lineno
        try:
            return self.removed(super().visit(node)) if not skipped(node) else node
        finally:
            self.statement = outer

    def removed(self, node: ast.AST) -> ast.AST:
        """Offer to leave the statement out, unless a name would be missing then."""
        match node:
            case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) | ast.Delete() | ast.Raise():
                return self.offer(node, ast.Pass())
            case ast.Break() | ast.Continue() | ast.Return(value=None):
                return self.offer(node, ast.Pass())
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
                return self.offer(node, ast.Pass())
            case ast.AnnAssign(target=ast.Attribute() | ast.Subscript(), value=ast.expr()):
                return self.offer(node, ast.Pass())
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.visit(node.args)
        self.functions += 1
        node.body = [self.visit(statement) for statement in node.body]
        self.functions -= 1
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg == "strict" else self.generic_visit(node)  # of `zip`: an assertion

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node  # not its annotation

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.target = self.visit(node.target)
        node.value = node.value and self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # texts

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        variants = [
            ast.Compare(node.left, [*node.ops[:at], new(), *node.ops[at + 1 :]], node.comparators)
            for at, op in enumerate(node.ops)
            for new in COMPARISONS[type(op)]
        ]
        return self.offer(node, *variants)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        return self.offer(node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self.offer(node, node.operand) if isinstance(node.op, ast.Not) else node

    def negated(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            node.test = self.offer(node.test, ast.UnaryOp(ast.Not(), node.test))
        return node

    visit_If = visit_While = visit_IfExp = negated

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        match node.value:
            case bool(value):
                return self.offer(node, ast.Constant(not value))
            case int(value):
                return self.offer(node, ast.Constant(value + 1), ast.Constant(value - 1))
            case float(value):
                return self.offer(node, ast.Constant(value + 1))
            case bytes(value):
                return self.offer(node, ast.Constant(value + b"X"))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        is_type = not self.functions and isinstance(node.op, ast.BitOr)
        new = OPERATORS.get(type(node.op))
        return self.offer(node, ast.BinOp(node.left, new(), node.right)) if new and not is_type else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        node.value = self.visit(node.value)
        new = OPERATORS.get(type(node.op))
        return self.offer(node, ast.AugAssign(node.target, new(), node.value)) if new else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is None or isinstance(node.value, ast.Constant):
            return node
        return self.offer(node, ast.Return(ast.Constant(None)))


def skipped(node: ast.stmt) -> bool:
    """Whether a statement only writes to the log, is for type checkers, or describes an object to a developer."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=method))):
            return method in LOG_METHODS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assert() | ast.FunctionDef(name="__repr__"):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
    return False


class Recorder(ast.NodeTransformer):
    """Puts a call in front of every statement of a function."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.functions = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_function = isinstance(node, ast.FunctionDef)
        self.functions += is_function
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if self.functions and isinstance(body, list):
                setattr(node, name, [new for statement in body for new in (self.call(statement), statement)])
        self.functions -= is_function
        return node

    def call(self, statement: ast.stmt) -> ast.stmt:
        call = ast.parse(f"__mutants_hit__(({self.path!r}, {statement.lineno}))").body[0]
        for node in ast.walk(call):
            ast.copy_location(node, statement)
        return call


def codes(original: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield each code object of a file with the one that replaces it."""
    yield original, new
    inner = [[part for part in code.co_consts if isinstance(part, CodeType)] for code in (original, new)]
    if [part.co_qualname for part in inner[0]] == [part.co_qualname for part in inner[1]]:
        for pair in zip(*inner, strict=True):
            yield from codes(*pair)


def identity(code: CodeType) -> tuple[str, str, int, bytes]:
    return code.co_filename, code.co_qualname, code.co_firstlineno, code.co_code


class Code:
    """The functions of the sources that live in this process."""

    def __init__(self, sources: list[str]) -> None:
        self.texts = {path: Path(path).read_text("utf-8") for path in sources}
        self.trees = {path: compile(text, str(Path(path).resolve()), "exec") for path, text in self.texts.items()}
        self.functions: dict[tuple[str, str, int, bytes], list[FunctionType]] = {}
        gc.unfreeze()  # objects that `tests/conftest.py` froze are not listed
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType):
                self.functions.setdefault(identity(thing.__code__), []).append(thing)

    def replace(self, path: str, transformer: ast.NodeTransformer) -> int:
        """Put the transformed code into the functions of a file; return how many were changed."""
        done = 0
        for old, new in codes(self.trees[path], compiled(self.texts[path], path, transformer)):
            if (old.co_code, old.co_consts) == (new.co_code, new.co_consts):
                continue
            for function in self.functions.get(identity(old), ()):
                function.__code__ = new
                done += 1
        return done


def compiled(text: str, path: str, transformer: ast.NodeTransformer) -> CodeType:
    tree = ast.fix_missing_locations(transformer.visit(ast.parse(text)))
    return compile(tree, str(Path(path).resolve()), "exec")


class Check:
    """A pytest plugin that runs the tests once for each mutant."""

    def __init__(self, options: argparse.Namespace, sources: list[str], mutants: list[Mutant]) -> None:
        self.options, self.sources, self.mutants = options, sources, mutants
        self.failed = False
        self.survivors: list[Mutant] = []
        self.tried = 0
        self.cold_tests: dict[tuple[str, int], list[str]] = {}
        self.slowness = 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        quick_hypothesis()
        for path in self.sources:
            importlib.import_module(".".join(Path(path).with_suffix("").parts).removesuffix(".__init__"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.code = Code(self.sources)
        began = time.monotonic()
        self.record()
        if not self.by_statement:
            raise pytest.UsageError("no test executes a statement of these files")
        print(f"{len(self.items)} tests recorded in {time.monotonic() - began:.0f} s", flush=True)
        for number, mutant in enumerate(self.mutants, 1):
            killer = self.killer(mutant)
            self.tried += 1
            if killer is None:
                self.survivors.append(mutant)
            if self.options.verbose or killer is None:
                print(f"{number:4} {mutant}: {killer or 'SURVIVED'} ({time.monotonic() - began:.0f} s)", flush=True)
        return True

    def record(self) -> None:
        """Run each test once; keep those that pass, how long they take and what they execute."""

        def run() -> Any:
            hits: set[tuple[str, int]] = set()
            builtins.__mutants_hit__ = hits.add  # type: ignore[attr-defined]
            for path in self.sources:
                self.code.replace(path, Recorder(path))
            found = {}
            for item in self.items.values():
                hits.clear()
                began = time.monotonic()
                if self.passes(item):
                    found[item.nodeid] = (time.monotonic() - began, frozenset(hits))
                else:
                    print(f"fails without a mutant: {item.nodeid}", flush=True)
            return found

        outcome = in_child(run, 3600, quiet=False)
        assert isinstance(outcome, dict), outcome
        self.seconds = {name: seconds for name, (seconds, _) in outcome.items()}
        self.by_statement: dict[tuple[str, int], list[str]] = {}
        self.by_file: dict[str, set[str]] = {}
        for name in sorted(self.seconds, key=self.seconds.__getitem__):
            for path, line in outcome[name][1]:
                self.by_statement.setdefault((path, line), []).append(name)
                self.by_file.setdefault(path, set()).add(name)

    def passes(self, item: pytest.Item) -> bool:
        self.failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self.failed

    def killer(self, mutant: Mutant) -> str | None:
        known = self.by_statement.get((mutant.path, mutant.statement), [])
        if not known:  # an import may execute it
            return self.cold_killer(mutant)
        tests = self.affordable(known)
        while tests:
            failed = self.first_failure(mutant, tests)
            if failed == "timeout" and self.is_slow(lambda: self.first_failure(None, tests)):
                continue
            if not isinstance(failed, int):
                return failed
            one = [tests[failed]]
            if self.first_failure(mutant, one) is not None and self.first_failure(None, one) is None:
                return tests[failed]
            del tests[: failed + 1]  # it fails sometimes
        return None

    def affordable(self, tests: list[str]) -> list[str]:
        total = list(itertools.accumulate(self.seconds[test] for test in tests))
        return [test for test, seconds in zip(tests, total, strict=True) if seconds <= self.options.budget]

    def is_slow(self, run_unchanged: Callable[[], object]) -> bool:
        """Whether the tests need more time also without a mutant; they get twice as long from now on."""
        slow = run_unchanged() == "timeout"
        self.slowness *= 2 if slow else 1
        return slow

    def first_failure(self, mutant: Mutant | None, tests: list[str]) -> int | str | None:
        def run() -> Any:
            if mutant and not self.code.replace(mutant.path, Mutator(mutant.path, mutant.number)):
                return "nowhere"
            return next((at for at, test in enumerate(tests) if not self.passes(self.items[test])), None)

        outcome = in_child(run, self.deadline_s(tests))
        return self.cold_killer(mutant) if mutant and outcome == "nowhere" else outcome

    def deadline_s(self, tests: list[str]) -> float:
        return self.slowness * (SPARE_S + 6 * sum(self.seconds[test] for test in tests))

    def cold_killer(self, mutant: Mutant) -> str | None:
        """Return what kills a mutant that is imported anew: first the tests of its module, then the others."""
        words = Path(mutant.path).stem.split("_")
        files = {test.partition("::")[0] for test in self.by_file.get(mutant.path, ())}
        found = [test for test in self.seconds if test.partition("::")[0] in files]  # also those that read constants
        found.sort(key=self.seconds.__getitem__)
        own = [test for test in found if any(word in test.partition("::")[0] for word in words)]
        for at, tests in enumerate((own, [test for test in found if test not in own])):
            known = mutant.path, at
            if known not in self.cold_tests:
                self.cold_tests[known] = self.reliable(mutant.path, self.affordable(tests))
            if self.cold_tests[known] and (killer := self.killed_cold(mutant, self.cold_tests[known])):
                return killer
        return None

    def killed_cold(self, mutant: Mutant, tests: list[str]) -> str | None:
        failed = self.run_cold(mutant, tests)
        if failed == "timeout" and self.is_slow(lambda: self.run_cold(unchanged(mutant.path), tests)):
            return self.killed_cold(mutant, tests)
        if not isinstance(failed, list):
            return failed
        again = self.run_cold(mutant, failed)
        return again if again is None or isinstance(again, str) else failed[0]

    def reliable(self, path: str, tests: list[str]) -> list[str]:
        """Leave out the tests that fail after a new import without a mutant."""
        failed = self.run_cold(unchanged(path), tests) if tests else None
        if isinstance(failed, str):  # it did not end
            return self.reliable(path, tests[: len(tests) // 2])
        return [test for test in tests if test not in (failed or ())]

    def run_cold(self, mutant: Mutant, tests: list[str]) -> list[str] | str | None:
        """Return the tests that fail with the imported mutant, or how the process ended; None when all pass."""
        outcome = in_child(lambda: failures(mutant, tests), 2 * SPARE_S + self.deadline_s(tests))
        return outcome or None


def in_child(run: Callable[[], Any], deadline_s: float, quiet: bool = True) -> Any:
    """Return what the function returns in a forked process; "timeout", or "died" when the process does not say."""
    with tempfile.NamedTemporaryFile() as answer:
        child = gevent.os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
                if quiet:
                    null = os.open(os.devnull, os.O_RDWR)
                    os.dup2(null, 1)
                    os.dup2(null, 2)
                Path(answer.name).write_bytes(pickle.dumps(run()))
            os._exit(0)
        ends = time.monotonic() + deadline_s
        timed_out = False
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.003)
            if time.monotonic() > ends:
                timed_out = True
                ends += 3600
                os.killpg(child, signal.SIGKILL)
        if timed_out:
            return "timeout"
        return pickle.loads(text) if (text := Path(answer.name).read_bytes()) else "died"


def quick_hypothesis() -> None:
    """No database and no search for the smallest example; the same examples each time."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", hypothesis.settings(), database=None, derandomize=True, phases=phases, deadline=None
    )
    hypothesis.settings.load_profile("mutants")


def pytest_options(folder: str) -> list[str]:
    """What the tests are run with: in one process, without what repeats or kills them."""
    without = [word for name in ("xdist", "cacheprovider", "timeout") for word in ("-p", f"no:{name}")]
    options = ["-q", "-q", "-s", "--no-header", "--tb=no", "-W", "ignore", "--import-mode=importlib", "-o", "addopts="]
    return [*options, *without, f"--basetemp={folder}/base", "-m", "not (servers or browser or spark or cluster)"]


def failures(mutant: Mutant, tests: list[str]) -> list[str] | str:
    """Import the mutant and all modules of this folder anew, and run tests until one fails."""
    source = str(Path(mutant.path).resolve())
    get_code = importlib.machinery.SourceFileLoader.get_code

    def mutated(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if loader.get_filename(name) != source:
            return get_code(loader, name)
        return compiled(Path(source).read_text("utf-8"), mutant.path, Mutator(mutant.path, mutant.number))

    importlib.machinery.SourceFileLoader.get_code = mutated  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.is_relative_to(Path.cwd()) and "site-packages" not in file.parts and name != "__main__":
            del sys.modules[name]
    found: list[str] = []

    class Quick:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            found.extend([report.nodeid] * report.failed)

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(self) -> None:
            quick_hypothesis()

    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        status = pytest.main([*["-x"][: mutant.number >= 0], *pytest_options(folder), *tests], plugins=[Quick()])
    return found or (f"exit status {int(status)}" if status else "")


class Equivalent:
    """The mutants that change nothing which a test could observe, from the file beside this one.

    A line is `path || line of the source || old -> new`, with a star for all mutants of that line of the source.
    """

    def __init__(self) -> None:
        lines = EQUIVALENT.read_text("utf-8").splitlines() if EQUIVALENT.exists() else []
        self.entries = {line for line in lines if line and not line.startswith("#")}
        self.sources: dict[str, list[str]] = {}

    def __contains__(self, mutant: Mutant) -> bool:
        if mutant.path not in self.sources:
            self.sources[mutant.path] = Path(mutant.path).read_text("utf-8").splitlines()
        beginning = f"{mutant.path} || {self.sources[mutant.path][mutant.line - 1].strip()} || "
        return beginning + "*" in self.entries or beginning + mutant.text in self.entries


def all_mutants(sources: list[str]) -> list[Mutant]:
    mutants: list[Mutant] = []
    for path in sources:
        mutator = Mutator(path)
        mutator.visit(ast.parse(Path(path).read_text("utf-8")))
        mutants += mutator.mutants
    return mutants


def drawn(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return a random sample, in random order: the share of a run that was interrupted is an estimate too."""
    return random.Random(seed).sample(mutants, min(size, len(mutants)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Lists changes of the code that no test notices, and their share.")
    parser.add_argument("what", nargs="+", help=f"{', '.join(GROUPS)}, or files in Python")
    parser.add_argument("--tests", nargs="+", help="files or folders of tests, for files in Python")
    parser.add_argument("--sample", type=int, default=200, help="how many mutants are tried (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--budget", type=float, default=12, help="seconds of tests for one mutant (default 12)")
    parser.add_argument("--verbose", action="store_true", help="also list what killed the others")
    options = parser.parse_args()
    sources = [source for name in options.what for source in GROUPS.get(name, ([name], []))[0]]
    tests = options.tests or [test for name in options.what for test in GROUPS.get(name, ([], []))[1]]
    paths = map(Path, sources)
    files = [str(file) for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    found = all_mutants(files)
    without = Equivalent()
    candidates = [mutant for mutant in found if mutant not in without]
    sample = drawn(candidates, options.sample, options.seed)
    check = Check(options, files, sample)
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        status = pytest.main([*pytest_options(folder), *tests], plugins=[check])
    killed = check.tried - len(check.survivors)
    without_effect = len(found) - len(candidates)
    print(f"{len(found)} mutants, {without_effect} of them equivalent; {check.tried} tried (seed {options.seed})")
    print(f"killed: {killed} of {check.tried}, {100 * killed / max(check.tried, 1):.0f} %")
    return int(status) or int(check.tried < len(sample))


if __name__ == "__main__":
    sys.exit(main())
