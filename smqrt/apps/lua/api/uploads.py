"""Python half of `ba.create.upload` (spec: bas-api §4, §17)."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from socket import SHUT_RDWR, socket

from smqrt.apps.lua.api.exchange import DeferredBinding, DeferredResponse, Exchanges, url_of
from smqrt.apps.lua.api.files import FilesBinding
from smqrt.apps.lua.bridge import LuaError, LuaValue, from_utf8, methods, utf8
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.headers import ClientGoneError, HttpError
from smqrt.http.message import Request, UploadError, is_form, receive
from smqrt.http.resources import Io
from smqrt.http.sessions import RequestSessions
from smqrt.process.current_process import close_with_app
from smqrt.settings.limits import Limit

_BUSY = "Too many uploads are in progress; try again in a second."
_NO_ANSWER = "The application did not respond to the upload."


class LuaUpload:
    """An upload in progress, which the greenlet of its request runs.

    Args:
        binding: calls the functions in Lua.
        number: its number in Lua, also that of its response.
        request: the request with the body.
        io: where the file is stored.
        name: the name of the file that the application chose; then that of the file being received.
    """

    def __init__(self, binding: UploadsBinding, number: int, request: Request, io: Io, name: str) -> None:
        self._binding, self.number, self.request, self._io, self.name = binding, number, request, io, name
        self.is_form = is_form(request)
        self.url = url_of(request)
        self.response: DeferredResponse | None = None
        self._is_closed = False

    def run(self) -> None:
        """Receive the upload, call the functions of the application, and wait for its response.

        Raises:
            HttpError: 500, the application did not respond.
            ClientGoneError: the client closed the connection, or the response was aborted.
        """
        try:
            receive(self.request, self._io, self.name, self)
        except UploadError as error:
            self._notify(b"failed", utf8(error.word), utf8(error.detail))
        except ClientGoneError as error:
            self._notify(b"failed", b"socketclosed", str(error).encode())
            raise
        finally:
            self._binding.ended(self)
        if self.response is None:
            raise HttpError(500, _NO_ANSWER, close=True)
        self.response.wait()

    # UploadWatcher

    def begin(self, name: str) -> bool:
        """See `UploadWatcher.begin`."""
        self.name = name
        return self._notify(b"started") and self.wants_more()

    def wants_more(self) -> bool:
        """See `UploadWatcher.wants_more`; False once the application has responded or ended."""
        return not (self._is_closed or (self.response is not None and self.response.closed.is_set()))

    def end(self) -> None:
        """See `UploadWatcher.end`."""
        self._notify(b"done")

    def _notify(self, event: bytes, *more: LuaValue) -> bool:
        return not self._is_closed and self._binding.notify(self.number, event, *more)

    def close(self) -> None:
        """Call no more functions of the application, which ends, and shut down the connection."""
        self._is_closed = True
        # Not `close`: the request's greenlet may be reading from the connection, and then reads its end.
        with suppress(OSError), socket(fileno=os.dup(self.request.transport.fileno())) as duplicate:
            duplicate.shutdown(SHUT_RDWR)


UPLOADS = Limit("uploads", "maxuploads of the uploader", "uploads in progress of one uploader")


class UploadsBinding:
    """Uploads by number."""

    def __init__(
        self, vm: Vm, exchanges: Exchanges, files: FilesBinding, deferred: DeferredBinding, sessions: RequestSessions
    ) -> None:
        self._vm, self._exchanges, self._io_of = vm, exchanges, files.io
        self._deferred, self._sessions = deferred, sessions
        self._notify_ref = self._forget_ref = 0
        self._uploads: dict[int, LuaUpload] = {}
        self._next_uploader = itertools.count(1).__next__
        self._counts: dict[int, int] = {}  # uploader -> number of its uploads
        self._uploader_of: dict[int, int] = {}

    def attach(self, notify_ref: int, forget_ref: int) -> None:
        """Set the references of the Lua functions that notify the application and that forget an upload."""
        self._notify_ref, self._forget_ref = notify_ref, forget_ref

    def new_uploader(self) -> int:
        """Return the number of a new uploader."""
        return self._next_uploader()

    def take(self, uploader: int, max_uploads: int, handle: int, io: int, name: bytes) -> bool:
        """Turn a request into an upload, which begins when its page has ended.

        Args:
            uploader: number of the uploader.
            max_uploads: limit of the uploads of the uploader.
            handle: of the exchange.
            io: handle of the io where the file is stored.
            name: of the file.

        Returns:
            False if the uploader has too many uploads; the client then receives 503.

        Raises:
            ArgumentError: the response has begun, or the request is not an upload.
        """
        exchange = self._exchanges.of(handle)
        request = exchange.request
        # The greenlet of the request receives the upload after the page, so the page can't have begun a response.
        if request.response.committed or exchange.wait is not None:
            raise ArgumentError("upload: iscommitted; an upload begins before the response")
        if request.method != "PUT" and not (request.method == "POST" and is_form(request)):
            raise exchange.mismatched(405, "upload: the request is neither PUT nor a POST of a form with files")
        if self._counts.get(uploader, 0) >= max_uploads:
            UPLOADS.refused("an upload", f"{max_uploads} uploads of its uploader are in progress")
            exchange.refusal = HttpError(503, _BUSY, headers={"Retry-After": "1"}, close=True)
            return False
        upload = self._uploads[handle] = LuaUpload(self, handle, request, self._io_of(io), from_utf8(name))
        self._counts[uploader] = self._counts.get(uploader, 0) + 1
        self._uploader_of[handle] = uploader
        exchange.wait = upload.run
        close_with_app(upload)
        return True

    def notify(self, number: int, event: bytes, *more: LuaValue) -> bool:
        """Call a function of the application; return whether it succeeded. Lua logs its error."""
        try:
            return self._vm.run(self._notify_ref, number, event, *more) == (True,)
        except LuaError:
            return False

    def ended(self, upload: LuaUpload) -> None:
        """Forget an upload that was received or has failed."""
        del self._uploads[upload.number]
        uploader = self._uploader_of.pop(upload.number)
        self._counts[uploader] -= 1
        if not self._counts[uploader]:
            del self._counts[uploader]
        self._vm.start(self._forget_ref, upload.number)

    def name(self, number: int) -> bytes:
        return utf8(self._of(number).name)

    def url(self, number: int) -> bytes:
        return self._of(number).url.encode()

    def is_multipart(self, number: int) -> bool:
        return self._of(number).is_form

    def session(self, number: int) -> int | None:
        """Return the number of the client's HTTP session; None if it has none."""
        session = self._sessions.of(self._of(number).request)
        return None if session is None else session.number

    def respond(self, number: int) -> None:
        """Create the deferred response; its handle is the number of the upload."""
        upload = self._of(number)
        if upload.response is None:
            upload.response = self._deferred.open(number, upload.request.response)

    def _of(self, number: int) -> LuaUpload:
        upload = self._uploads.get(number)
        if upload is None:
            raise ArgumentError("the upload has ended")
        return upload


_DIRECT = "attach new_uploader take name url is_multipart session respond"


def install_uploads(
    vm: Vm, exchanges: Exchanges, files: FilesBinding, deferred: DeferredBinding, sessions: RequestSessions
) -> None:
    """Install `ba.create.upload`."""
    binding = UploadsBinding(vm, exchanges, files, deferred, sessions)
    vm.namespace("ba.uploads", methods(binding, _DIRECT))
