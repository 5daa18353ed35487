"""Checks of settings before a server starts, for `smqrt serve` and `smqrt config check`.

They open and create nothing. Whether a port is free, for instance, is known only when the server starts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from smqrt.acme.files import AcmeFiles
from smqrt.acme.orders import check_library
from smqrt.apps.lua.vm import lupa_of
from smqrt.auth.service import IdentityService
from smqrt.broker.last_values import check_filters
from smqrt.cluster.engines.process_cluster import check_plan
from smqrt.errors import ArgumentError, StartError
from smqrt.process.environment import state_folder
from smqrt.server.live_settings import cluster_plan
from smqrt.server.mako_conf import MakoConf
from smqrt.server.ports import admin_files, lacks_certificate, ports
from smqrt.server.restart.control_socket import check_socket_path
from smqrt.settings.settings import AdminSettings, AuthSettings, Settings
from smqrt.transport import server_tls
from smqrt.transport.origins import Hosts, Origins
from smqrt.transport.server_tls import TlsFiles

_SELF_SIGNED = "a self-signed certificate, which is made when the server starts"


def check_startable(settings: Settings, conf: MakoConf | None = None) -> None:
    """Check settings, and the files that they name.

    Args:
        settings: with the self-signed certificate, or without one.
        conf: the mako.conf.

    Raises:
        StartError: the server would not start, or a part of it would not work; one sentence.
    """
    check_certificate(settings)
    acme_files(settings)
    lupa_of(settings.lua.version)
    check_socket_path("restart.socket", settings.restart.socket)
    try:
        check_plan(cluster_plan(settings.cluster))
        Origins(settings.origins)
        Hosts(settings.hosts.split(","))
    except ArgumentError as error:
        raise StartError(f"{error}.") from None
    try:
        check_filters(settings.topics)
    except ArgumentError as error:
        raise StartError(f"topics: {error}.") from None
    for files in _tls_files(settings, conf):
        server_tls.check(files, datetime.now(UTC))
    _check_access_log(settings.log.access)
    if IdentityService.is_wanted(settings.auth):
        lists = [settings.tls.client_crl, *(one.client_crl for one in settings.listener.values())]
        IdentityService.check(settings.auth, list(filter(None, lists)))
    _check_admin_host(settings.admin, settings.auth)


def check_certificate(settings: Settings) -> None:
    """Raise StartError when there is a certificate without its key, or a key without its certificate."""
    if bool(settings.cert) != bool(settings.key):
        given, missing = ("--cert", "--key") if settings.cert else ("--key", "--cert")
        raise StartError(f"{given} needs {missing} too; a certificate and its private key belong together.")


def acme_files(settings: Settings) -> AcmeFiles | None:
    """Return the files of the certificate that the server orders by ACME; None when it orders none.

    Raises:
        StartError: the settings contradict one another, the library is missing, or there is no folder for the files.
    """
    tls = settings.tls
    if not tls.acme:
        return None
    if bool(tls.acme_eab_id) != bool(tls.acme_eab_key):
        raise StartError("tls.acme_eab_id and tls.acme_eab_key belong together; give both, or none.")
    check_library()
    if tls.acme_folder:
        folder = Path(tls.acme_folder).absolute()
    elif state := os.environ.get("STATE_DIRECTORY"):  # of systemd
        folder = Path(state.partition(":")[0]) / "acme"
    else:
        try:
            folder = state_folder() / "acme"
        except FileNotFoundError as error:
            raise StartError(
                f"tls.acme has no place for its files: {error.strerror}; or set tls.acme_folder."
            ) from None
    files = AcmeFiles(folder, tls.acme_directory, tls.acme)
    if settings.cert and settings.cert != str(files.cert):
        raise StartError("tls.acme orders the certificate that cert and key name; leave out one of them.")
    if not settings.cert and not lacks_certificate(settings):
        raise StartError("tls.acme orders a certificate, and no port with TLS wants one; set tls_port.")
    return files


def _tls_files(settings: Settings, conf: MakoConf | None) -> Iterator[TlsFiles]:
    if lacks_certificate(settings):
        settings = replace(settings, cert=_SELF_SIGNED, key=_SELF_SIGNED)
    for files in filter(None, [*(one.tls for one in ports(settings, conf)), admin_files(settings)]):
        yield replace(files, pairs=tuple(pair for pair in files.pairs if _SELF_SIGNED not in pair))


def _check_access_log(path: str) -> None:
    if path in ("", "-"):  # none, or standard output
        return
    folder = Path(path).absolute().parent
    fault = 0
    if not folder.is_dir():
        fault = errno.ENOENT
    elif Path(path).is_dir():
        fault = errno.EISDIR
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        fault = errno.EACCES
    if fault:
        raise StartError(f"log.access: {path} can't be written: {os.strerror(fault)}.")


def _check_admin_host(admin: AdminSettings, auth: AuthSettings) -> None:
    try:
        is_open = not ip_address(admin.host.strip("[]")).is_loopback
    except ValueError:
        return  # a name: the server resolves it at its start
    if admin.enabled and is_open and not auth.users:
        raise StartError(
            f"admin.host = {admin.host} would let everybody in who reaches this machine; name a file of users in"
            " auth.users, or leave the admin listener on 127.0.0.1."
        )
