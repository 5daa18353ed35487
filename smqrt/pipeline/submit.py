"""Pipelines on a cluster: the command for spark-submit, the archive of files, and the driver.

<app>/.pipelines/submit/smqrt.zip      smqrt, pyspark_smq and the application's pipelines, for --py-files
<app>/.pipelines/submit/driver.py      the program that the cluster runs; it calls `main`
<app>/.pipelines/submit/token.conf     the hub's token, readable only by its owner; process lists don't show it
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from urllib.parse import urlsplit

from smqrt.errors import JournalError, PipelineError, SmqrtError
from smqrt.journal import files
from smqrt.journal.files import HubAddress
from smqrt.pipeline import checkpoint, jvm

TOKEN_CONF = "spark.smqrt.token"
"""Spark hides the values of settings whose name contains "token"."""

_CLUSTERS = ("spark://", "k8s://", "yarn", "local")
_OWN_PACKAGES = ("smqrt", "pyspark_smq")
_OWN_SUFFIXES = (".py", ".properties")
_APP = "smqrt_app"
_PIPELINES = f"{_APP}/pipelines"
CAFILE = "cafile.pem"
"""Name of the file with certificates, in the application's folder of a driver in the cluster."""
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_DRIVER = "from smqrt.pipeline.submit import main\n\nmain()\n"


@dataclass(frozen=True)
class Submission:
    """The options of a submission.

    Attributes:
        names: the names of the queries; empty means all.
        master: spark://host:port, k8s://https://host:port, yarn, or local….
        app: the application's folder; its pipelines are in `pipelines`.
        journal: a path that all machines can read, or an http(s) URL.
        state: folder of checkpoints and status, which all machines can access under this path.
        tables: folder or URI for tables with a relative path; None uses `.tables` of the application.
        deploy_mode: "client" runs the driver on this machine, "cluster" on a machine of the cluster.
        token: the hub's token; None uses the one in the journal's folder.
        cafile: PEM file with certificates to trust instead of the system's; the archive contains it.
        python: the path of the workers' Python; None uses that of this process with "client", of the image with
            "cluster".
        start, once, republish: as for `smqrt pipeline run`.
        extra: additional arguments for spark-submit.
    """

    names: tuple[str, ...]
    master: str
    app: Path
    journal: str
    state: Path
    tables: str | None = None
    deploy_mode: str = "client"
    token: str | None = None
    cafile: str | None = None
    python: str | None = None
    start: str = "latest"
    once: bool = False
    republish: bool = False
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command that is ready to run.

    Attributes:
        words: the command; environment: additional environment variables.
    """

    words: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])

    def execute(self) -> None:
        """Replace this process by the command; does not return."""
        sys.stdout.flush()
        os.execvpe(self.words[0], self.words, os.environ | self.environment)


def prepare(submission: Submission) -> Command:
    """Write the files and return the command.

    Args:
        submission: the options.

    Raises:
        PipelineError: the cluster doesn't support these options, Java or pyspark is missing, or a file can't be
            written.
    """
    _check(submission)
    folder = submission.app / ".pipelines" / "submit"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        package = pack(folder / "smqrt.zip", submission.app / "pipelines", submission.cafile)
        (folder / "driver.py").write_text(_DRIVER, "utf-8")
        words = [*_spark_words(submission, package), *submission.extra, str(folder / "driver.py")]
        words += ["--journal", submission.journal, "--state", str(submission.state), "--from", submission.start]
        is_client = submission.deploy_mode == "client"
        words += ["--app", str(submission.app.resolve())] if is_client else []
        words += ["--tables", submission.tables] if submission.tables else []
        if submission.cafile:
            words += ["--cafile", submission.cafile if is_client else CAFILE]
        words += ["--once"] if submission.once else []
        words += ["--republish"] if submission.republish else []
        environment = {"JAVA_HOME": str(jvm.find_java().home)}
        if python := _python(submission):
            # Spark searches for data sources with this Python, before it reads any setting.
            environment["PYSPARK_PYTHON"] = python
        return Command([*words, *submission.names], environment)
    except OSError as error:
        raise PipelineError(f"{error.filename or folder} can't be written: {error.strerror}.") from None


def pack(path: Path, pipelines: Path, cafile: str | None = None) -> Path:
    """Write the archive for --py-files, or replace an older one.

    Args:
        path: the path of the archive.
        pipelines: the folder of pipeline files; its folder `tests` is left out.
        cafile: of `Submission`.

    Returns:
        `path`.
    """
    fresh = path.with_suffix(f".{os.getpid()}.new")  # renamed, since an earlier submission may read the archive
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _OWN_PACKAGES:
            spec = util.find_spec(name)
            assert spec is not None
            assert spec.submodule_search_locations
            root = Path(spec.submodule_search_locations[0])
            for file in _files(root, _OWN_SUFFIXES):
                archive.write(file, Path(name) / file.relative_to(root))
        for file in _files(pipelines, ("",)):  # also the tables of references, and modules that pipelines import
            if file.relative_to(pipelines).parts[0] != "tests":
                archive.write(file, f"{_PIPELINES}/{file.relative_to(pipelines)}")
        if cafile:
            archive.write(cafile, f"{_APP}/{CAFILE}")
    fresh.rename(path)
    return path


def _check(submission: Submission) -> None:
    checkpoint.check_position(submission.start, "--from")
    master, mode = submission.master, submission.deploy_mode
    if not master.startswith(_CLUSTERS):
        raise PipelineError(
            f"--master {master} is not a cluster: use spark://HOST:PORT, k8s://https://HOST:PORT or yarn."
        )
    if mode == "cluster" and not master.startswith(("k8s://", "yarn")):
        raise PipelineError(
            f"--deploy-mode cluster: {master} runs Python drivers only on this machine; use --deploy-mode client."
        )
    if mode == "cluster" and submission.tables and not files.is_elsewhere(submission.tables):
        _check_absolute("--tables", submission.tables, "or a URI")
    if mode == "cluster" and not files.is_address(submission.journal):
        _check_absolute("--journal", submission.journal, "or an http(s) URL of the hub")
    if "--properties-file" in submission.extra and submission.token:
        raise PipelineError(
            f"--token is passed in a properties file, and Spark takes only one: write {TOKEN_CONF} into yours instead."
        )
    if urlsplit(submission.journal).hostname in _LOCAL_HOSTS and mode == "cluster":
        raise PipelineError(
            f"--journal {submission.journal} is another machine in the cluster: use the hub's address there."
        )


def unreachable_hub(journal: str, master: str) -> str | None:
    """Return a warning when the machines of a cluster can't reach the hub that the folder of a journal names.

    Args:
        journal: path or URL; master: of `Submission`.

    Returns:
        A sentence; None when they can reach it, or the hub is not running.
    """
    if files.is_address(journal) or master.startswith("local") or urlsplit(master).hostname in _LOCAL_HOSTS:
        return None
    try:
        url = HubAddress.of(journal).url
    except JournalError:
        return None
    if urlsplit(url).hostname not in _LOCAL_HOSTS:
        return None
    return (
        f"the journal {journal} has the hub's address {url}, which is another machine in the cluster: large results, "
        "which workers publish, do not reach the hub. Give its address in the cluster with --journal and --token."
    )


def _check_absolute(option: str, path: str, otherwise: str) -> None:
    if not Path(path).is_absolute():
        raise PipelineError(
            f"{option} {path}: with --deploy-mode cluster give a path that all machines can access, {otherwise}."
        )


def _spark_words(submission: Submission, package: Path) -> list[str]:
    home = os.environ.get("SPARK_HOME")
    if not home:
        spec = util.find_spec("pyspark")
        if spec is None or not spec.submodule_search_locations:
            raise PipelineError("pyspark is not installed; run: pip install 'smqrt[spark]'")
        home = spec.submodule_search_locations[0]
    words = [str(Path(home) / "bin" / "spark-submit"), "--master", submission.master]
    words += ["--deploy-mode", submission.deploy_mode, "--name", "smqrt " + (" ".join(submission.names) or "pipelines")]
    words += ["--py-files", str(package)]
    words += ["--conf", f"spark.pyspark.python={python}"] if (python := _python(submission)) else []
    if submission.deploy_mode == "client":
        # The driver logs to the same file as `smqrt pipeline run`; workers use the settings of their cluster.
        logging = Path(__file__).parent / "log4j2.properties"
        java = [f"-Dlog4j2.configurationFile={logging}", f"-Dsmqrt.log={submission.state}/.spark/spark.log"]
        words += ["--conf", f"spark.pyspark.driver.python={sys.executable}"]
        words += ["--driver-java-options", " ".join([*java, "-Duser.timezone=UTC"])]
    if submission.token:
        path = package.parent / "token.conf"
        path.unlink(missing_ok=True)  # the mode below has an effect only on a new file
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{TOKEN_CONF} {submission.token}\n")
        # A properties file alone would replace Spark's default settings.
        words += ["--load-spark-defaults", "--properties-file", str(path)]
    return words


def _python(submission: Submission) -> str | None:
    return submission.python or (sys.executable if submission.deploy_mode == "client" else None)


def _files(root: Path, suffixes: Sequence[str]) -> list[Path]:
    found = [path for path in root.rglob("*") if path.is_file() and path.name.endswith(tuple(suffixes))]
    relative = ((path, path.relative_to(root).parts) for path in found)
    return sorted(
        path for path, parts in relative if not any(part.startswith(".") or part == "__pycache__" for part in parts)
    )


# ---- The driver: parses the same arguments, and unpacks the pipelines from the archive


def main(arguments: list[str] | None = None) -> None:
    """Run the pipelines under spark-submit, and end the process with the exit code.

    Args:
        arguments: those of `driver.py`; by default those of the process.
    """
    parser = argparse.ArgumentParser("driver.py")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--app")
    parser.add_argument("--journal", required=True)
    parser.add_argument("--state", required=True)
    parser.add_argument("--cafile")
    parser.add_argument("--tables")
    parser.add_argument("--from", dest="start", default="latest")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--republish", action="store_true")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            app = Path(given.app) if given.app else unpack(sys.path, Path(folder))
            from pyspark import SparkConf

            from smqrt.pipeline.discover import load
            from smqrt.pipeline.runner import RunOptions, run

            jvm.start()  # SparkConf needs it to read the settings of spark-submit
            options = RunOptions(
                journal=given.journal,
                app=app,
                state=files.state_folder(given.state),
                master="",
                start=given.start,
                once=given.once,
                republish=given.republish,
                token=SparkConf().get(TOKEN_CONF, None),
                cafile=str(app / given.cafile) if given.cafile else None,
                tables=given.tables,
            )
            sys.exit(run(load(app / "pipelines"), given.names, options))
    except SmqrtError as error:
        sys.exit(f"Error: {error}")


def unpack(path: list[str], folder: Path) -> Path:
    """Extract the application's pipelines from the archive that spark-submit has put on the path.

    Args:
        path: the search path of modules.
        folder: the folder to extract to.

    Returns:
        The application's folder.
    """
    for entry in path:
        if zipfile.is_zipfile(entry):
            with zipfile.ZipFile(entry) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.startswith(f"{_APP}/")])
    return folder / _APP
