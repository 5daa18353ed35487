"""Pipelines on a cluster: the command for spark-submit, what other machines lack, and the driver that runs there.

<app>/.pipelines/submit/smqrt.zip      smqrt, pyspark_smq and the application's pipelines, for --py-files
<app>/.pipelines/submit/driver.py      what the cluster runs; `main` is behind it
<app>/.pipelines/submit/token.conf     with a token: readable by its owner only, so that no list of processes shows it
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from urllib.parse import urlsplit

from smqrt.errors import JournalError, PipelineError, SmqrtError
from smqrt.journal import files
from smqrt.journal.files import HubAddress
from smqrt.pipeline import checkpoint, jvm

TOKEN_CONF = "spark.smqrt.token"
"""Spark shows values of settings whose name holds "token" to nobody."""

_CLUSTERS = ("spark://", "k8s://", "yarn", "local")
_OURS = ("smqrt", "pyspark_smq")
_SHIPPED = (".py", ".properties")
_APP = "smqrt_app"
_PIPELINES = f"{_APP}/pipelines"
CAFILE = "cafile.pem"
"""In the application's folder of a driver in the cluster."""
_HERE = ("127.0.0.1", "localhost", "::1")
_DRIVER = "from smqrt.pipeline.submit import main\n\nmain()\n"


@dataclass(frozen=True)
class Submission:
    """What is submitted.

    Attributes:
        names: of the queries; all when empty.
        master: spark://host:port, k8s://https://host:port, yarn, or local….
        app: the application's folder; its pipelines lie in `pipelines`.
        journal: path that every machine sees, or http(s) URL.
        state: folder of checkpoints and status, which every machine sees under this path.
        tables: folder or URI that tables with a relative path are below; None takes `.tables` of the application.
        deploy_mode: "client", the driver runs here, or "cluster", somewhere in the cluster.
        token: what the hub wants to see; None takes the one in the journal's folder.
        cafile: PEM file with certificates to trust instead of the system's; it travels in the archive.
        python: of the workers; None takes the path of the one that runs here, in a cluster what the image has.
        start, once, republish: as for `smqrt pipeline run`.
        extra: further arguments for spark-submit.
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
        words: the command; environment: variables that it needs beside those of this process.
    """

    words: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])

    def execute(self) -> None:
        """Becomes the command; doesn't return."""
        sys.stdout.flush()
        os.execvpe(self.words[0], self.words, os.environ | self.environment)


def prepare(submission: Submission) -> Command:
    """Write the files and returns the command.

    Args:
        submission: what to submit.

    Raises:
        PipelineError: the cluster can't run it this way, Java or pyspark is missing, or a file can't be written.
    """
    _check(submission)
    folder = submission.app / ".pipelines" / "submit"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        package = pack(folder / "smqrt.zip", submission.app / "pipelines", submission.cafile)
        (folder / "driver.py").write_text(_DRIVER, "utf-8")
        words = [*_spark_words(submission, package), *submission.extra, str(folder / "driver.py")]
        return Command([*words, *_driver_words(submission)], _environment(submission))
    except OSError as error:
        raise PipelineError(f"{error.filename or folder} can't be written: {error.strerror}.") from None


def pack(path: Path, pipelines: Path, cafile: str | None = None) -> Path:
    """Write the archive for --py-files, in place of an older one.

    Args:
        path: where to.
        pipelines: the folder of pipeline files; what lies in its folder `tests` stays here.
        cafile: of `Submission`.

    Returns:
        `path`.
    """
    fresh = path.with_suffix(f".{os.getpid()}.new")
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in [*_own_files(), *_application_files(pipelines)]:
            archive.write(file, name)
        if cafile:
            archive.write(cafile, f"{_APP}/{CAFILE}")
    fresh.rename(path)
    return path


def _check(submission: Submission) -> None:
    checkpoint.check_position(submission.start, "--from")
    master, mode = submission.master, submission.deploy_mode
    if not master.startswith(_CLUSTERS):
        raise PipelineError(
            f"--master {master} is no cluster: name spark://HOST:PORT, k8s://https://HOST:PORT or yarn."
        )
    if mode == "cluster" and not master.startswith(("k8s://", "yarn")):
        raise PipelineError(
            f"--deploy-mode cluster: {master} runs Python drivers only where you submit; use --deploy-mode client."
        )
    if mode == "cluster" and submission.tables and not files.is_elsewhere(submission.tables):
        _absolute("--tables", submission.tables, "or a URI")
    if mode == "cluster" and not files.is_address(submission.journal):
        _absolute("--journal", submission.journal, "or an http(s) URL of the hub")
    if "--properties-file" in submission.extra and submission.token:
        raise PipelineError(
            f"--token travels in a properties file, and Spark takes only one: write {TOKEN_CONF} into yours instead."
        )
    if urlsplit(submission.journal).hostname in _HERE and mode == "cluster":
        raise PipelineError(
            f"--journal {submission.journal} is another machine there: name the hub as the cluster reaches it."
        )


def unreachable_hub(journal: str, master: str) -> str | None:
    """Say that machines of a cluster don't find the hub that the folder of a journal names.

    Args:
        journal: path or URL; master: of `Submission`.

    Returns:
        A sentence; None when they do, or no hub runs that could be asked.
    """
    if files.is_address(journal) or master.startswith("local") or urlsplit(master).hostname in _HERE:
        return None
    try:
        url = HubAddress.of(journal).url
    except JournalError:
        return None
    if urlsplit(url).hostname not in _HERE:
        return None
    return (
        f"the journal {journal} names its hub as {url}, which is another machine in the cluster: what is published "
        "from there, all results of more than some MiB, does not reach it. Name the hub as the cluster reaches it, "
        "with --journal and --token."
    )


def _absolute(option: str, path: str, otherwise: str) -> None:
    if not Path(path).is_absolute():
        raise PipelineError(f"{option} {path}: with --deploy-mode cluster give a path every machine sees, {otherwise}.")


def _spark_words(submission: Submission, package: Path) -> list[str]:
    words = [str(_spark_home() / "bin" / "spark-submit"), "--master", submission.master]
    words += ["--deploy-mode", submission.deploy_mode, "--name", "smqrt " + (" ".join(submission.names) or "pipelines")]
    words += ["--py-files", str(package)]
    words += ["--conf", f"spark.pyspark.python={python}"] if (python := _python(submission)) else []
    if submission.deploy_mode == "client":
        words += ["--conf", f"spark.pyspark.driver.python={sys.executable}"]
        words += ["--driver-java-options", " ".join(_java_options(submission.state))]
    if submission.token:
        words += ["--load-spark-defaults", "--properties-file", str(_token_file(package.parent, submission.token))]
    return words


def _java_options(state: Path) -> list[str]:
    """Spark's log goes where `smqrt pipeline run` has it; workers keep theirs where their cluster does."""
    logging = Path(__file__).parent / "log4j2.properties"
    return [f"-Dlog4j2.configurationFile={logging}", f"-Dsmqrt.log={state}/.spark/spark.log", "-Duser.timezone=UTC"]


def _token_file(folder: Path, token: str) -> Path:
    path = folder / "token.conf"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"{TOKEN_CONF} {token}\n")
    return path


def _driver_words(submission: Submission) -> list[str]:
    words = ["--journal", submission.journal, "--state", str(submission.state), "--from", submission.start]
    if submission.deploy_mode == "client":
        words += ["--app", str(submission.app.resolve())]
    words += ["--tables", submission.tables] if submission.tables else []
    if submission.cafile:
        words += ["--cafile", submission.cafile if submission.deploy_mode == "client" else CAFILE]
    words += ["--once"] if submission.once else []
    words += ["--republish"] if submission.republish else []
    return [*words, *submission.names]


def _environment(submission: Submission) -> dict[str, str]:
    variables = {"JAVA_HOME": str(jvm.find_java().home)}
    # Spark looks for data sources with this one, before it knows of any setting.
    return variables | ({"PYSPARK_PYTHON": python} if (python := _python(submission)) else {})


def _python(submission: Submission) -> str | None:
    return submission.python or (sys.executable if submission.deploy_mode == "client" else None)


def _spark_home() -> Path:
    if home := os.environ.get("SPARK_HOME"):
        return Path(home)
    spec = util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise PipelineError("pyspark is not installed; type: pip install 'smqrt[spark]'")
    return Path(spec.submodule_search_locations[0])


def _own_files() -> Iterator[tuple[str, Path]]:
    for name in _OURS:
        spec = util.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        for file in _files(root, _SHIPPED):
            yield str(Path(name) / file.relative_to(root)), file


def _application_files(pipelines: Path) -> Iterator[tuple[str, Path]]:
    """Everything in the folder of pipelines: also the tables of references and modules that pipelines import."""
    for file in _files(pipelines, ("",)):
        if file.relative_to(pipelines).parts[0] != "tests":
            yield f"{_PIPELINES}/{file.relative_to(pipelines)}", file


def _files(root: Path, suffixes: Sequence[str]) -> list[Path]:
    found = [path for path in root.rglob("*") if path.is_file() and path.name.endswith(tuple(suffixes))]
    return sorted(path for path in found if not any(_hidden(part) for part in path.relative_to(root).parts))


def _hidden(part: str) -> bool:
    return part.startswith(".") or part == "__pycache__"


# ---- the driver: the same arguments again, and the pipelines out of the archive


def main(arguments: list[str] | None = None) -> None:
    """Run the pipelines under spark-submit, and ends the process with the exit code.

    Args:
        arguments: those of `driver.py`; the process's own when not given.
    """
    given = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(_run_packed(given, Path(given.app) if given.app else unpack(sys.path, Path(folder))))
    except SmqrtError as error:
        sys.exit(f"Error: {error}")


def unpack(path: list[str], folder: Path) -> Path:
    """Take the application's pipelines out of the archive that spark-submit has put on the path.

    Args:
        path: where modules are looked for.
        folder: where the pipelines go.

    Returns:
        The application's folder.
    """
    for entry in path:
        if zipfile.is_zipfile(entry):
            with zipfile.ZipFile(entry) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.startswith(f"{_APP}/")])
    return folder / _APP


def _run_packed(given: argparse.Namespace, app: Path) -> int:
    from smqrt.pipeline.discover import load
    from smqrt.pipeline.run_context import RunOptions
    from smqrt.pipeline.runner import run

    options = RunOptions(
        journal=given.journal,
        app=app,
        state=files.state_folder(given.state),
        master="",
        start=given.start,
        once=given.once,
        republish=given.republish,
        token=_conf_token(),
        cafile=str(app / given.cafile) if given.cafile else None,
        tables=given.tables,
    )
    return run(load(app / "pipelines"), given.names, options)


def _conf_token() -> str | None:
    from pyspark import SparkConf

    from smqrt.pipeline import jvm

    jvm.start()
    return SparkConf().get(TOKEN_CONF, None)


def _parser() -> argparse.ArgumentParser:
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
    return parser
