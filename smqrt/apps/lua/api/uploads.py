"""`ba.create.upload`: the Python half (spec: bas-api §4, §17)."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from functools import partial
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

_BUSY = "So many uploads at once are not taken here; try again in a second."
_NO_ANSWER = "The application gave no answer to the upload."


class LuaUpload:
    """An upload in progress, in the greenlet of its request.

    Args:
        binding: tells Lua.
        number: by which Lua knows it, and its response.
        request: whose body it is.
        io: gets the file.
        name: of the file, as given; then as it is.
    """

    def __init__(self, binding: UploadsBinding, number: int, request: Request, io: Io, name: str) -> None:
        self._binding, self.number, self.request, self._io, self.name = binding, number, request, io, name
        self.is_form = is_form(request)
        self.url = url_of(request)
        self.response: DeferredResponse | None = None
        self._is_closed = False

    def run(self) -> None:
        """Receive it, tell the application, and wait for its answer.

        Raises:
            HttpError: 500, there was none.
            ClientGoneError: the client went away, or the answer was aborted.
        """
        try:
            self._receive()
        finally:
            self._binding.ended(self)
        if self.response is None:
            raise HttpError(500, _NO_ANSWER, close=True)
        self.response.wait()

    def _receive(self) -> None:
        try:
            receive(self.request, self._io, self.name, self)
        except UploadError as error:
            self._tell(b"failed", utf8(error.word), utf8(error.detail))
        except ClientGoneError as error:
            self._tell(b"failed", b"socketclosed", str(error).encode())
            raise

    # Watcher

    def begin(self, name: str) -> bool:
        """See `Watcher.begin`."""
        self.name = name
        return self._tell(b"started") and self.wants_more()

    def wants_more(self) -> bool:
        """See `Watcher.wants_more`: until the application has given its answer."""
        return not (self._is_closed or (self.response is not None and self.response.closed.is_set()))

    def end(self) -> None:
        """See `Watcher.end`."""
        self._tell(b"done")

    def _tell(self, what: bytes, *more: LuaValue) -> bool:
        return not self._is_closed and self._binding.tell(self.number, what, *more)

    def close(self) -> None:
        """The application ends: its functions are called no more, and the connection is cut."""
        self._is_closed = True
        _cut(self.request)


def _cut(request: Request) -> None:
    """End the connection of a request, whose worker may be waiting for it and sees the end of the stream then."""
    with suppress(OSError), socket(fileno=os.dup(request.transport.fileno())) as twin:
        twin.shutdown(SHUT_RDWR)


UPLOADS = Limit("uploads", "maxuploads of the uploader", "so many uploads of one uploader are under way already")


class UploadsBinding:
    """Uploads by the numbers that Lua has for them."""

    def __init__(
        self, vm: Vm, exchanges: Exchanges, files: FilesBinding, deferred: DeferredBinding, sessions: RequestSessions
    ) -> None:
        self._vm, self._exchanges, self._io_of = vm, exchanges, files.io
        self._deferred, self._sessions = deferred, sessions
        self._tell = self._forget = 0
        self._uploads: dict[int, LuaUpload] = {}
        self._next_uploader = itertools.count(1).__next__
        self._under_way: dict[int, int] = {}  # uploader -> how many
        self._uploader_of: dict[int, int] = {}

    def attach(self, tell: int, forget: int) -> None:
        """Take the references of the Lua functions that tell the application and that forget an upload."""
        self._tell, self._forget = tell, forget

    def new_uploader(self) -> int:
        """The number of an uploader."""
        return self._next_uploader()

    def take(self, uploader: int, most: int, handle: int, io: int, name: bytes) -> bool:
        """Make the request an upload, which begins when its page has ended; False when there are too many."""
        exchange = self._exchanges.of(handle)
        request = exchange.request
        if request.response.committed or exchange.wait is not None:
            raise ArgumentError("upload: iscommitted; an upload begins before the response")
        if request.method != "PUT" and not (request.method == "POST" and is_form(request)):
            raise exchange.mismatched(405, "upload: the request is neither PUT nor a POST of a form with files")
        if self._under_way.get(uploader, 0) >= most:
            UPLOADS.refused("an upload", f"{most} of its uploader are under way already")
            exchange.refusal = HttpError(503, _BUSY, headers={"Retry-After": "1"}, close=True)
            return False
        upload = self._uploads[handle] = LuaUpload(self, handle, request, self._io_of(io), from_utf8(name))
        self._under_way[uploader] = self._under_way.get(uploader, 0) + 1
        self._uploader_of[handle] = uploader
        exchange.wait = partial(upload.run)
        close_with_app(upload)
        return True

    def tell(self, number: int, what: bytes, *more: LuaValue) -> bool:
        """Call a function of the application; return whether it succeeded. Lua logs its error."""
        try:
            return self._vm.run(self._tell, number, what, *more) == (True,)
        except LuaError:
            return False

    def ended(self, upload: LuaUpload) -> None:
        """Forget an upload whose body was received, or failed."""
        del self._uploads[upload.number]
        uploader = self._uploader_of.pop(upload.number)
        self._under_way[uploader] -= 1
        if not self._under_way[uploader]:
            del self._under_way[uploader]
        self._vm.start(self._forget, upload.number)

    def name(self, number: int) -> bytes:
        return utf8(self._of(number).name)

    def url(self, number: int) -> bytes:
        return self._of(number).url.encode()

    def is_multipart(self, number: int) -> bool:
        return self._of(number).is_form

    def session(self, number: int) -> int | None:
        """The number of the client's session."""
        session = self._sessions.of(self._of(number).request)
        return None if session is None else session.number

    def respond(self, number: int) -> None:
        """Make the deferred response; its handle is the upload's."""
        upload = self._of(number)
        if upload.response is None:
            upload.response = self._deferred.open(number, upload.request.response)

    def _of(self, number: int) -> LuaUpload:
        upload = self._uploads.get(number)
        if upload is None:
            raise ArgumentError("the upload has ended")
        return upload


_DIRECT = "attach new_uploader take name url is_multipart session respond"


def install(
    vm: Vm, exchanges: Exchanges, files: FilesBinding, deferred: DeferredBinding, sessions: RequestSessions
) -> None:
    """Give Lua `ba.create.upload`."""
    binding = UploadsBinding(vm, exchanges, files, deferred, sessions)
    vm.namespace("ba.uploads", methods(binding, _DIRECT))
