"""Driver of the client for MicroPython for the client cases; see the README of this folder. It runs in MicroPython."""

import binascii
import json
import select
import sys

sys.path.insert(0, "../../../smqrt/clients/micropython")
from smq_full import SmqClient

POLL_MS = 5
LATER = object()
"""The result of a command that answers itself."""


def emit(answer):
    """Write one line."""
    print(json.dumps(answer))


def payload_of(command):
    """Return the payload of a command, which has `text`, `base64` or `repeat`."""
    if "base64" in command:
        return binascii.a2b_base64(command["base64"])
    if "repeat" in command:
        return (command["repeat"]["text"] * command["repeat"]["times"]).encode()
    return command["text"].encode()


def shown(data):
    """Return a payload as `text`, or as `base64` when it is not UTF-8."""
    try:
        return {"text": str(data, "utf-8")}
    except UnicodeError:
        return {"base64": str(binascii.b2a_base64(data), "utf-8").strip()}


class Client:
    """One client of a case."""

    def __init__(self, name):
        self.name = name
        self.smq = None
        self.ended = False
        self.paused = None
        self.reason = None
        self.subtopics = {}
        self.prefix = None

    def event(self, kind, **fields):
        """Report an event."""
        fields.update(client=self.name, event=kind)
        emit(fields)

    # ---- callbacks

    def on_close(self, reason, can_reconnect):
        self.reason = reason
        self.event("disconnected", reason=reason)

    def on_message(self, names):
        """Return the handler of a subscription, whose names are (topic, sub-topic)."""

        def report(data, ptid, tid, subtid):
            if names[0] == "self" and subtid and self.prefix:
                self.smq.publish(self.prefix + data, ptid, subtid)
                return
            fields = {"topic": names[0], "subtopic": names[1] or self.subtopics.get(subtid), "from": ptid}
            fields.update(shown(data))
            if self.paused is None:
                self.event("message", **fields)
            else:
                self.paused.append(fields)

        return report

    def poll(self):
        """Handle what has arrived, and report the end of the client once."""
        if self.smq and not self.smq.poll():
            self.end()

    def end(self):
        if not self.ended:
            self.ended = True
            self.event("closed", reason=self.reason)

    # ---- commands

    def connect(self, command):
        options = {"timeout": 10, "max_message": 65520, "queue_bytes": 20000, "reconnect_delay": 0.05}
        options["reconnect_delay_max"] = 0.5
        options["reconnect"] = command.get("options", {}).get("reconnect", True)
        for name in ("uid", "info"):
            if name in command:
                options[name] = command[name]
        if "password" in command:
            options["onauth"] = lambda rnd, ip: command["password"]
        self.smq = SmqClient(
            command["url"],
            onconnect=lambda etid, rnd, ip: self.event("connected", etid=etid),
            onreconnect=lambda etid, rnd, ip: self.event("reconnected", etid=etid),
            onclose=self.on_close,
            onmsg=self.on_message(("self", None)),
            **options,
        )

    def subscribe(self, command):
        names = command["topic"], command.get("subtopic")
        self.smq.subscribe(
            *names,
            onmsg=self.on_message(names),
            onack=lambda accepted, topic, tid: self.event("subscribed", topic=topic, accepted=accepted),
        )

    def unsubscribe(self, command):
        self.smq.unsubscribe(command["topic"])

    def publish(self, command):
        topic = command["etid"] if "etid" in command else command["topic"]
        while not self.smq.publish(payload_of(command), topic, command.get("subtopic")):
            if self.smq.closed or not self.smq.connected:
                raise OSError("the client is closed or its queue is full")
            self.smq.poll(POLL_MS)

    def createsub(self, command):
        def acknowledged(accepted, subtopic, subtid):
            self.subtopics[subtid] = subtopic
            self.event("created", subtopic=subtopic, stid=subtid)

        self.smq.createsub(command["subtopic"], acknowledged)

    def observe(self, command):
        kind = "etid" if "etid" in command else "topic"

        def changed(subscribers, topic):
            fields = {kind: topic, "subscribers": subscribers}
            self.event("change", **fields)

        self.smq.observe(command[kind], changed)

    def unobserve(self, command):
        self.smq.unobserve(command["etid"] if "etid" in command else command["topic"])

    def request(self, command):
        def answered(data):
            answer = {"id": command["id"]}
            if data is None:
                answer["error"] = "no answer"
            else:
                answer.update(shown(data), ok=True)
            emit(answer)

        self.smq.request(command["etid"], payload_of(command), answered, command["timeout_ms"] / 1000)
        return LATER

    def answer(self, command):
        self.prefix = command["prefix"].encode()

    def pause(self, command):
        self.paused = []

    def resume(self, command):
        for fields in self.paused:
            self.event("message", **fields)
        self.paused = None

    def disconnect(self, command):
        self.smq.close(15)
        self.end()

    def close(self, command):
        if self.smq:
            self.smq.close(0)
        self.smq = None

    def state(self, command):
        return {"connected": self.smq.connected, "etid": self.smq.etid}


def run(client, command):
    """Run a command and answer it."""
    answer = {"id": command["id"]}
    try:
        fields = getattr(client, command["do"])(command)
        if fields is LATER:
            return
        answer.update(fields or {}, ok=True)
    except (OSError, ValueError, AttributeError) as error:
        answer["error"] = str(error)
    emit(answer)


def main():
    """Run the commands of standard input, and poll the clients meanwhile."""
    clients = {}
    poller = select.poll()
    poller.register(sys.stdin, select.POLLIN)
    while True:
        for client in clients.values():
            client.poll()
        if not poller.poll(POLL_MS):
            continue
        line = sys.stdin.readline()
        if not line:
            return
        command = json.loads(line)
        client = clients.setdefault(command["client"], Client(command["client"]))
        run(client, command)
        if command["do"] == "close":
            del clients[command["client"]]


main()
