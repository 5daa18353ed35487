"""SMQ client for MicroPython with observations, requests and numbers of sub-topics; needs smq.py beside it."""

import os
import struct
import time

import smq

_SUBACK, _CREATE, _CREATEACK, _PUBLISH, _CONNACK = 5, 6, 7, 8, 3
_OBSERVE, _UNOBSERVE, _CHANGE, _CREATESUB, _CREATESUBACK = range(14, 19)
_MAX_REQUESTS = 16
smq._SIZES[_CHANGE] = 11


class SmqClient(smq.SmqClient):
    """The client of smq.py with the methods `observe`, `unobserve`, `createsub` and `request`."""

    def __init__(self, url, **options):
        self._observed, self._created = {}, {}  # by topic or etid: onchange; by sub-topic: onack
        self._asked = set()  # numbers that this connection observes
        self._requests = {}  # by the number of the answer: etid, onreply, end
        super().__init__(url, **options)

    def observe(self, topic, onchange):
        """Call `onchange(subscribers, topic)` now and at each change; for an etid once, when its client is gone."""
        self._observed[smq._bytes(topic)] = onchange
        if self.connected:
            self._ask(smq._bytes(topic))

    def unobserve(self, topic):
        """End the observation of a topic or etid."""
        topic = smq._bytes(topic)
        self._observed.pop(topic, None)
        tid = topic if isinstance(topic, int) else self._topics.get(topic)
        if tid in self._asked:
            self._asked.remove(tid)
            self._send(_UNOBSERVE, struct.pack(">I", tid))

    def createsub(self, subtopic, onack=None):
        """Request the number of a sub-topic, also after reconnects; `onack(accepted, subtopic, subtid)` comes once."""
        self._created[smq._bytes(subtopic)] = onack
        if self.connected:
            self._number(_CREATESUB, smq._bytes(subtopic), self._subtopics)
            self._acknowledge(smq._bytes(subtopic))

    def request(self, etid, data, onreply, timeout=10):
        """Send data to a client, or to the server (1); `onreply(data)` gets the answer, None after `timeout` seconds.

        Return False when the message cannot be queued, as `publish`, and while 16 requests have no answer.
        """
        number = struct.unpack(">I", os.urandom(4))[0] or 1
        if len(self._requests) >= _MAX_REQUESTS or not self.publish(data, etid, number):
            return False
        self._requests[number] = etid, onreply, smq._after(timeout)
        return True

    def poll(self, wait_ms=0):
        """Do the same as `poll` of smq.py, and end requests without an answer."""
        for _, _, end in self._requests.values():
            wait_ms = min(wait_ms, time.ticks_diff(end, time.ticks_ms()))
        super().poll(wait_ms)
        self._end_requests()
        return not self.closed

    def close(self, timeout=5):
        """Do the same as `close` of smq.py, and end all requests."""
        has_received = super().close(timeout)
        self._end_requests()
        return has_received

    def _end_requests(self):
        for number, (_, onreply, end) in list(self._requests.items()):
            if self.closed or time.ticks_diff(end, time.ticks_ms()) <= 0:
                self._requests.pop(number, None)
                self._call(onreply, None)

    def _ask(self, topic):
        """Observe a topic at the broker when its number is known, once in a connection."""
        tid = self._number(_CREATE, topic, self._topics)
        if tid and tid not in self._asked:
            self._asked.add(tid)
            self._send(_OBSERVE, struct.pack(">I", tid))

    def _acknowledge(self, subtopic):
        onack, number = self._created.get(subtopic), self._subtopics.get(subtopic)
        if onack and number is not None:
            self._created[subtopic] = None
            self._call(onack, number > 0, str(subtopic, "utf-8"), number)

    def _handle(self, kind, body):
        if kind == _CONNACK and not self.connected:
            self._asked = set()
        elif kind == _PUBLISH and self._requests:
            tid, ptid, subtid = struct.unpack(">III", body[:12])
            if tid == self.etid and self._requests.get(subtid, (0,))[0] == ptid:
                kind = None  # handled here
                self._call(self._requests.pop(subtid)[1], bytes(body[12:]))
        super()._handle(kind, body)
        if kind == _CONNACK:
            for subtopic in self._created:
                self._number(_CREATESUB, subtopic, self._subtopics)
            for topic in list(self._observed):
                self._ask(topic)
        elif kind in (_SUBACK, _CREATEACK) and bytes(body[5:]) in self._observed:
            self._ask(bytes(body[5:]))
        elif kind == _CREATESUBACK:
            self._acknowledge(bytes(body[5:]))
        elif kind == _CHANGE:
            tid, subscribers = struct.unpack(">II", body[:8])
            name = self._topics.get(tid, b"")
            if tid in self._observed:  # an etid, whose client is gone
                self._asked.discard(tid)
                self._call(self._observed.pop(tid), subscribers, tid)
            elif name in self._observed:
                self._call(self._observed[name], subscribers, str(name, "utf-8"))
