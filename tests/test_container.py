"""The files of scripts/container, as far as they can be checked without a container engine."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from smqrt.settings.sources import Sources
from tests.cli.commands import Command
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "scripts" / "container"
INSTRUCTIONS = {
    "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT",
    "CMD",
}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def said(word: str) -> list[str]:
    return [rest for one, rest in instructions() if one == word]


def test_the_image_runs_unprivileged_with_its_settings() -> None:
    assert {word for word, _ in instructions()} <= INSTRUCTIONS
    assert said("USER") == ["9357:9357"]
    assert said("STOPSIGNAL") == ["SIGTERM"]
    variables = dict(pair.split("=", 1) for pair in shlex.split(said("ENV")[0]))
    found = Sources(environment={name: value for name, value in variables.items() if name.startswith("SMQRT_")}).read()
    assert (found.settings.host, found.settings.log.format, found.warnings) == ("0.0.0.0", "json", ())
    check = re.search(r"CMD (\[.*\])", said("HEALTHCHECK")[0])
    assert check
    program, *words = yaml.safe_load(check[1])
    assert program == "smqrt"
    assert Command(words[0])("--help").exit_code == 0
    assert yaml.safe_load(said("ENTRYPOINT")[0]) == ["smqrt", "serve"]


def test_the_image_gets_what_an_installation_needs() -> None:
    kept = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().split("\n") if line.startswith("!")]
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "smqrt", "*.md"):
        assert name in kept
    for name in kept:
        assert name == "MANIFEST.in" or list(REPOSITORY.glob(name)), name


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    return found


def test_the_services_belong_together(services: dict[str, Any]) -> None:
    assert set(services) == {"smqrt", "prometheus", "grafana"}
    server = services["smqrt"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert int(server["stop_grace_period"].removesuffix("s")) > Sources().read().settings.drain.timeout_s
    build = server["build"]
    assert (FOLDER / build["context"]).resolve() == REPOSITORY
    assert (REPOSITORY / build["dockerfile"]).is_file()
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (FOLDER / source).exists(), source


def test_prometheus_asks_where_the_server_answers(services: dict[str, Any]) -> None:
    from smqrt.server.listeners import ADMIN_PORT as PORT

    assert services["prometheus"]["network_mode"] == "service:smqrt"
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": [f"127.0.0.1:{PORT}"]}]
    source = yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://smqrt:9090"
    boards = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())["providers"][0]["options"]["path"]
    assert any(volume.split(":")[1].startswith(f"{boards}/") for volume in services["grafana"]["volumes"])
