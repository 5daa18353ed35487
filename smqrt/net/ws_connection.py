"""An SMQ client on a WebSocket: frames are turned into raw frames in the receive buffer and take the same path
(specification: smq.md §12.11).
"""

from __future__ import annotations

from time import time
from typing import Any

from smqrt.errors import CloseReason, ProtocolError
from smqrt.net import datapath
from smqrt.net.connection import RawConnection, chars, view
from smqrt.wire import smq, websocket
from smqrt.wire.websocket import Assembler, Frame

unmask = datapath.kernels.unmask


class WsConnection(RawConnection):
    """A client on a WebSocket.

    `decoded` holds raw frames that were unmasked already when a hook made the connection wait.
    """

    __slots__ = ("assembler", "close_sent", "decoded")
    websocket = True
    takes_fragments = False

    def __init__(self, sock: Any, watcher: Any) -> None:
        super().__init__(sock, watcher)
        self.assembler: Assembler | None = None
        self.decoded = b""
        self.close_sent = False

    # ---- reading

    def feed(self, size: int) -> None:
        """Work off the WebSocket frames in `chars[:size]`."""
        try:
            self._work_off(size)
        except ProtocolError as error:
            self.session.fail(error)

    def _work_off(self, size: int) -> None:
        """Route the plain messages at the front; from the first frame of another kind on, take frame by frame."""
        written, used = (0, 0) if self.assembler and self.assembler.busy else unmask(size)
        rest = chars[used:size] if used < size else b""
        if written and not self._route_decoded(written):
            self.carry = rest
            return
        at = self._frame_by_frame(rest) if rest else 0
        self.carry = rest[at:]

    def _frame_by_frame(self, data: bytes) -> int:
        """Handle the frames of `data`; gives how many bytes were worked off."""
        at, until_s = 0, datapath.share_ends_s()
        while not self.closed:
            if time() >= until_s and at < len(data):
                self.give_way()
                break
            frame, end = websocket.parse_client_frame(data, smq.MAX_PACKET_BYTES, at)
            if frame is None:
                break
            at = end
            message = self._frame(frame)
            if message is not None and not self._route_message(message):
                break
        return at

    def _route_message(self, packet: bytes) -> bool:
        if not packet:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        raw = smq.frame(packet)
        view[: len(raw)] = raw
        return self._route_decoded(len(raw))

    def _route_decoded(self, size: int) -> bool:
        """Route raw frames; false when the connection waits or ended."""
        used = self.route(size)
        if self.paused and used < size:
            self.decoded = chars[used:size]
        return not self.paused and not self.closed

    def on_data_waiting(self) -> None:
        """Work off what was decoded before a pause, then what was received."""
        decoded, self.decoded = self.decoded, b""
        if decoded and not self.closed:
            view[: len(decoded)] = decoded
            if not self._route_decoded(len(decoded)):
                return
        super().on_data_waiting()

    def _frame(self, frame: Frame) -> bytes | None:
        """Handle a frame that the kernel left; gives a message when one is complete."""
        if frame.opcode == websocket.PING:
            self.put(websocket.encode(websocket.PONG, frame.payload))
        elif frame.opcode == websocket.CLOSE:
            self._closing(frame.payload)
        elif frame.opcode != websocket.PONG:
            return self._assembled(frame)
        return None

    def _assembled(self, frame: Frame) -> bytes | None:
        if frame.fin and frame.opcode != websocket.CONTINUATION and not (self.assembler and self.assembler.busy):
            return websocket.checked(frame.opcode, frame.payload)
        if self.assembler is None:
            self.assembler = Assembler()
        return self.assembler.add(frame, smq.MAX_PACKET_BYTES)

    def _closing(self, payload: bytes) -> None:
        self._send_close(websocket.check_close(payload))
        self.session.disconnect(CloseReason.WEBSOCKET_CLOSED)

    def _send_close(self, code: int) -> None:
        self.close_sent = True
        self.put(websocket.encode(websocket.CLOSE, websocket.close_payload(code)))

    # ---- writing

    def reply(self, packet: bytes) -> None:
        """Queue a control packet."""
        if not self.closed:
            self.put(websocket.encode(websocket.BINARY, packet))

    @staticmethod
    def frame_bytes(run: bytes, at: int) -> int:
        """The size of the WebSocket frame at `run[at]`."""
        short = run[at + 1]
        return short + 2 if short < 126 else (run[at + 2] << 8 | run[at + 3]) + 4

    @staticmethod
    def is_message(run: bytes, at: int) -> bool:
        """Whether the WebSocket frame at `run[at]` carries Publish."""
        return run[at] == 0x82 and run[at + (2 if run[at + 1] < 126 else 4)] == smq.Type.PUBLISH

    def _last_words(self, reason: CloseReason) -> None:
        if not self.close_sent:
            self._send_close(websocket.close_code(reason))
        super()._last_words(reason)
