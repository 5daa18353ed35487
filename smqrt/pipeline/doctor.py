"""Checks of everything that pipelines need, for `smqrt pipeline doctor`: one line each, with the remedy."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from smqrt.errors import SmqrtError
from smqrt.pipeline import jvm, stateful_plan
from smqrt.pipeline.failures import first_line, planning_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from smqrt.pipeline.graph import Graph, QueryPlan

EXTRA = "pip install 'smqrt[spark]'"
PYSPARK = ((4, 2), (5,))
"""The first supported version, and the first unsupported one."""
PYARROW = ((18,), None)
PANDAS = ((2, 2), (3, 0))
PROTOBUF = ((6, 33),)
MEMORY_BYTES = 1536 << 20
"""Needed memory of a driver, its JVM and its Python workers for a small pipeline, with a reserve."""
DISK_BYTES = 1 << 30

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: the subject of the check.
        ok: whether the check passed.
        detail: the finding.
        remedy: how to fix it; a warning, or empty, if the check passed.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorOptions:
    """Options of the checks.

    Attributes:
        app: the application's folder; its pipelines are in `pipelines`.
        state: folder of the state of queries.
        journal: path or URL of the journal.
        token: the hub's token; None uses the one in the journal's folder.
        cafile: as for `open_journal`.
        spark: whether to start Spark and plan every query.
    """

    app: Path
    state: Path
    journal: str
    token: str | None = None
    cafile: str | None = None
    spark: bool = True


def examine(options: DoctorOptions) -> Generator[Check]:
    """Check everything that pipelines need, fast checks first.

    Spark is started only if Java and the packages are installed and the pipelines can be loaded.
    """
    try:
        found = jvm.find_java()
        java = Check("java", True, f"version {found.version}, {found.command}")
    except SmqrtError as error:
        detail, _, remedy = str(error).rpartition(": ")
        java = Check("java", False, detail, remedy)
    checks = [
        java,
        package("pyspark", *PYSPARK),
        package("pyarrow", *PYARROW),
        package("pandas", *PANDAS),
        package("protobuf", *PROTOBUF),
        memory(),
        disk(options.state),
        writable(options.state),
        executable(Path(tempfile.gettempdir())),
    ]
    yield from checks
    yield _checked("journal", _journal, options)
    yield _checked("hub", _hub, options)
    yield (pipelines := _checked("pipelines", _pipelines, options))
    if not (options.spark and pipelines.ok and all(check.ok for check in checks[:4])):
        return
    from smqrt.pipeline.session import start_spark

    began = time.monotonic()
    try:
        session = start_spark("local[1]", "smqrt doctor", options.state, {})
    except Exception as error:
        yield Check("spark", False, first_line(error).rstrip("."), "smqrt pipeline doctor --no-spark shows the rest")
        return
    yield Check("spark", True, f"started in {time.monotonic() - began:.1f} s")
    try:
        yield from check_plans(options, session)
    finally:
        session.stop()


def package(name: str, least: tuple[int, ...], below: tuple[int, ...] | None = None) -> Check:
    """Check that a package is installed in a supported version.

    Args:
        name: the name of the package.
        least: the first supported version; below: the first unsupported one.
    """
    wanted = f"{'.'.join(map(str, least))} or newer" + (f", before {'.'.join(map(str, below))}" if below else "")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, False, "not installed", EXTRA)
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))  # suffixes such as rc1 do not matter
    if numbers < least or (below and numbers >= below):
        return Check(name, False, f"version {version}, but {wanted} is needed", EXTRA)
    return Check(name, True, f"version {version}")


def memory(meminfo: Path = _MEMORY, cgroup: Path = _CGROUP) -> Check:
    """Check that enough memory is available for a driver.

    Args:
        meminfo, cgroup: the kernel's files about memory.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    free = int(found[1]) << 10 if found else MEMORY_BYTES
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        limit = "max"
    if limit != "max":  # the limit of a container, whose file cache the kernel frees on demand
        free = min(free, max(0, int(limit) - used + (int(cached[1]) if cached else 0)))
    detail = f"{_size(free)} available"
    if free >= MEMORY_BYTES:
        return Check("memory", True, detail)
    remedy = f"{_size(MEMORY_BYTES)} are needed: end programs, raise the container's limit, or submit to a cluster"
    return Check("memory", False, detail, remedy)


def disk(folder: Path, needed_bytes: int = DISK_BYTES) -> Check:
    """Check that the disk of `folder`, which need not exist, has space for checkpoints and tables."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    detail = f"{_size(free)} free in {there}"
    if free >= needed_bytes:
        return Check("disk", True, detail)
    return Check("disk", False, detail, f"{_size(needed_bytes)} are needed: free some space, or use another --app")


def writable(folder: Path) -> Check:
    """Check that the folder of state can be written; a missing folder is created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return Check("state", True, f"{folder} can be written")
    except OSError as error:
        remedy = f"give user {os.getuid()} write access"
        return Check("state", False, f"{folder} can't be written: {error.strerror}", remedy)


def executable(folder: Path) -> Check:
    """Check that Spark may run the libraries that it unpacks into the temporary folder, such as RocksDB."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return Check("temp", False, f"{folder} is mounted noexec", "set TMPDIR to a folder that is not")
    return Check("temp", True, f"{folder}")


def _checked(name: str, check: Callable[[DoctorOptions], Check], options: DoctorOptions) -> Check:
    """Run a check; an error of this package becomes its result, with the remedy from the message."""
    try:
        return check(options)
    except SmqrtError as error:
        detail, separator, remedy = str(error).rpartition(": ")
        return Check(name, False, detail, remedy) if separator else Check(name, False, remedy)


def _journal(options: DoctorOptions) -> Check:
    from smqrt.journal.remote import open_journal

    journal = open_journal(options.journal, options.token, cafile=options.cafile, retry_s=0)
    begin, end = journal.begin(), journal.end()
    if not end:
        remedy = "give the hub journal=True, and publish a message"
        return Check("journal", False, f"{options.journal} has no rows", remedy)
    return Check("journal", True, f"{options.journal}, {journal.count(begin, end):,} rows of {', '.join(end)}")


def _hub(options: DoctorOptions) -> Check:
    from smqrt.journal.files import HubAddress
    from smqrt.journal.remote import RemoteJournal

    address = HubAddress.of(options.journal, options.token, options.cafile).find()
    RemoteJournal(address.url, address.token, cafile=address.certificates, retry_s=0).end()
    return Check("hub", True, f"{address.url} responds")


def _pipelines(options: DoctorOptions) -> Check:
    from smqrt.pipeline.discover import load

    names = [query.name for query in load(options.app / "pipelines").queries()]
    if not names:
        return Check("pipelines", False, f"{options.app / 'pipelines'} is empty", "smqrt pipeline init NAME")
    return Check("pipelines", True, ", ".join(names))


def check_plans(options: DoctorOptions, session: SparkSession) -> Iterator[Check]:
    """Check that Spark can run each query.

    Args:
        options: the options.
        session: the SparkSession.
    """
    from smqrt.pipeline import discover
    from smqrt.pipeline.checkpoint import QueryStart
    from smqrt.pipeline.discover import load
    from smqrt.pipeline.graph import Graph, JournalSource, plans

    catalog, start = load(options.app / "pipelines"), QueryStart({}, None)
    rows = JournalSource(options.journal, options.token, options.cafile)
    graph = Graph(  # one for all queries, so that shared parts are made once
        catalog,
        lambda source: rows.stream(session, source, start, source.name),
        lambda reference: discover.table(session, reference, catalog.folder),
    )
    for plan in plans(catalog, catalog.queries()):
        warnings: list[Check] = []
        yield _checked(plan.name, partial(_check_plan, plan, graph, session, warnings), options)
        yield from warnings


def _check_plan(
    plan: QueryPlan, graph: Graph, session: SparkSession, warnings: list[Check], options: DoctorOptions
) -> Check:
    """Check that Spark can run a query as a stream, without reading rows; add its warnings to the list."""
    from smqrt.pipeline import tables
    from smqrt.pipeline.sinks import as_messages, partitioned

    frame = plan.make(graph)
    try:
        # The result must have the columns in its topic template, or those of its partitions.
        if plan.declaration.kind == "table":
            tables.check_format_installed(plan.declaration)
            partitioned(frame, plan.declaration)
        else:
            as_messages(frame, plan.declaration)
        found = stateful_plan.operators_of(frame, plan.declaration) or []
        jvm.check_streaming(session, frame, plan.declaration.options["mode"])
    except SmqrtError:
        raise
    except Exception as error:
        raise planning_error(plan.declaration, error) from error
    if warning := stateful_plan.endless(found, plan.declaration.options["mode"]):
        detail, _, remedy = warning.partition(": ")
        warnings.append(Check(f"{plan.name} state", True, detail, remedy))
    return Check(plan.name, True, "can be run: " + ", ".join(frame.columns))


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):,.1f} GB"
