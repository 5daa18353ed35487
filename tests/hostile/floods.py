"""Messages faster than they can be delivered."""

from __future__ import annotations

from smqrt.wire import smq
from tests.hostile.conftest import Attack
from tests.support.device import Device, publish

BYTES_EACH = 1 << 20


def flood(device: Device, tid: int, payload_bytes: int, attack: Attack) -> None:
    data = smq.frame(publish(tid, device.etid, bytes(payload_bytes))) * (BYTES_EACH // (payload_bytes + 15))
    device.sock.settimeout(60)
    device.send_bytes(data)
    device.send(smq.PING).expect(smq.PONG)  # all of it is worked off
    attack.sent(len(data))
