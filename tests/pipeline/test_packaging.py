"""Spark finds the source `smq` by itself, and finding it costs its helper processes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.conftest import REPOSITORY


def python(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_spark_finds_the_source_where_smqrt_is_installed(tmp_path: Path) -> None:
    found = python("import pkgutil; print([module.name for module in pkgutil.iter_modules()])", tmp_path)
    assert "'pyspark_smq'" in found


def test_finding_it_loads_neither_the_journal_nor_a_hub(tmp_path: Path) -> None:
    code = (
        "import sys, json, pyspark.sql.datasource; before = set(sys.modules); import pyspark_smq; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = json.loads(python(code, tmp_path))
    others = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert others == {"smqrt", "pyspark_smq"}
    assert not [
        name for name in loaded if name.startswith(("smqrt.journal", "smqrt.hub", "smqrt.smq", "smqrt.transport"))
    ]
    assert "smqrt.pipeline.smq_source.scan" not in loaded


def test_a_wheel_has_the_package_at_its_top(wheel_path: Path) -> None:
    names = zipfile.ZipFile(wheel_path).namelist()
    assert "pyspark_smq/__init__.py" in names
    packages = {str(path.parent.relative_to(REPOSITORY)) for path in (REPOSITORY / "smqrt").rglob("__init__.py")}
    packages = {name for name in packages if "pyspark_smq" not in name}
    assert not {f"{name}/__init__.py" for name in packages} - set(names), "setup.cfg lists every package"
    assert "smqrt/pipeline/smq_source/scan.py" in names
    assert not [name for name in names if name.startswith(("tests", "scripts"))]


def test_a_wheel_asks_for_spark_only_in_its_extra(wheel_path: Path) -> None:
    wheel = zipfile.ZipFile(wheel_path)
    metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    lines = [line for line in wheel.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    wanted = [line for line in lines if "pyspark" in line or "pyarrow" in line]
    assert wanted
    ours = ('extra == "spark"', 'extra == "connect"')
    assert all(any(one in line for one in ours) for line in wanted if "pyspark" in line)
    assert all("extra ==" in line for line in wanted)
