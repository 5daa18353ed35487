"""The session, which outlives a connection, against a broker of a few lines: no socket, no time."""

import time

from smqrt.clients.smq.protocol import Ack, Change, ClientProtocol
from smqrt.clients.smq.session import SELF, ClientSession
from smqrt.wire import smq
from smqrt.wire.smq import Type
from smqrt.wire.url import parse_url

ACKS = {Type.SUBSCRIBE: Type.SUBACK, Type.CREATE: Type.CREATEACK, Type.CREATESUB: Type.CREATESUBACK}


class Wire:
    """Both ends of a session: what it sent, and answers to its requests.

    Args:
        base: the first number given; every name gets the next.
        denied: names that are refused.
    """

    def __init__(self, session, etid=50, base=100, denied=()):
        self.session, self.denied = session, denied
        self.numbers, self.base = {}, base
        self.log = []
        self.protocol = ClientProtocol(parse_url("http://host/"))
        self.protocol.take()
        self.restored = []
        session.open(self.protocol, etid, lambda: self.restored.append(True))

    def sent(self):
        """Packets sent since the last call."""
        packets = [frame[2:] for frame in smq.frames(self.protocol.take())]
        self.log += packets
        return packets

    def answer(self):
        """Answer everything until nothing more is asked."""
        while packets := self.sent():
            for packet in packets:
                if packet[0] in ACKS:
                    number = 0 if packet[1:] in self.denied else self._number(packet[1:])
                    self.session.acked(Ack(ACKS[packet[0]], number, packet[1:]))
        return self

    def _number(self, name):
        return self.numbers.setdefault(name, self.base + len(self.numbers))

    def kinds(self, kind):
        return [packet[1:] for packet in self.log if packet[0] == kind]

    def published(self):
        return [smq.unpack_publish(b"\0\0" + packet) for packet in self.log if packet[0] == Type.PUBLISH]


def new_session(**options):
    return ClientSession(options.pop("queue_bytes", 1 << 20), **options)


def number(n):
    return n.to_bytes(4, "big")


def ignore(*_):
    pass


def handler(data, ptid, tid, subtid):
    pass


def other(data, ptid, tid, subtid):
    pass


def test_create_requests_a_number_only_once():
    session, answers = new_session(), []
    wire = Wire(session)
    session.create(b"a", answers.append)
    wire.answer()
    session.create(b"a", answers.append)
    wire.answer()
    assert answers == [100, 100]
    assert wire.kinds(Type.CREATE) == [b"a"]


def test_a_created_topic_is_still_subscribed_at_the_broker():
    session = new_session()
    wire = Wire(session)
    session.create(b"a", ignore)
    wire.answer()
    session.subscribe(b"a", None, handler, ignore)
    assert wire.sent() == [smq.with_name(Type.SUBSCRIBE, b"a")]


def test_a_published_topic_is_still_subscribed_at_the_broker():
    session = new_session()
    wire = Wire(session)
    session.publish(b"x", b"a", None)
    wire.answer()
    session.subscribe(b"a", None, handler, ignore)
    assert wire.sent() == [smq.with_name(Type.SUBSCRIBE, b"a")]


def test_acknowledgements_come_in_the_order_of_the_requests():
    session, order = new_session(), []
    wire = Wire(session)
    session.subscribe(b"a", b"s", handler, lambda tid, stid: order.append(("a", tid, stid)))
    session.subscribe(b"b", None, handler, lambda tid, stid: order.append(("b", tid, stid)))
    session.subscribe(b"a", b"u", handler, lambda tid, stid: order.append(("a2", tid, stid)))
    wire.answer()
    assert order == [("a", 101, 100), ("b", 102, 0), ("a2", 101, 103)]


def test_messages_leave_in_the_order_of_the_calls():
    session = new_session()
    wire = Wire(session)
    session.publish(b"known", b"a", None)
    wire.answer()
    session.publish(b"1", b"new", b"sub")
    session.publish(b"2", b"a", None)
    session.publish(b"3", SELF, None)
    wire.answer()
    assert [payload for *_, payload in wire.published()] == [b"known", b"1", b"2", b"3"]
    assert wire.published()[1] == (101, 50, 102, b"1")
    assert wire.published()[3] == (50, 50, 0, b"3")
    assert wire.kinds(Type.CREATE) == [b"a", b"new"]


def test_a_refused_topic_drops_and_counts_its_messages():
    session = new_session()
    wire = Wire(session, denied=(b"secret",))
    session.publish(b"1", b"secret", None)
    session.publish(b"2", b"open", None)
    session.publish(b"3", b"open", b"secret")
    session.publish(b"4", b"open", None)
    wire.answer()
    assert [payload for *_, payload in wire.published()] == [b"2", b"4"]
    assert session.dropped == 2
    assert session.waiting_bytes == 0


def test_a_refused_subscription_keeps_other_messages_to_its_topic():
    session = new_session()
    wire = Wire(session)
    session.subscribe(b"a", None, handler, ignore)
    session.publish(b"1", b"a", None)
    assert wire.sent() == [smq.with_name(Type.SUBSCRIBE, b"a"), smq.with_name(Type.CREATE, b"a")]
    session.acked(Ack(Type.SUBACK, 0, b"a"))
    session.acked(Ack(Type.CREATEACK, 7, b"a"))
    wire.sent()
    assert wire.published() == [(7, 50, 0, b"1")]


def test_routes_prefer_subtopic_then_topic_then_none():
    session = new_session()
    wire = Wire(session)
    session.subscribe(b"a", b"s", handler, ignore)
    session.subscribe(b"a", None, other, ignore)
    session.subscribe(b"b", b"s", handler, ignore)
    session.subscribe(SELF, None, handler, ignore)
    session.subscribe(b"silent", None, None, ignore)
    wire.answer()
    s, a, b = (wire.numbers[name] for name in (b"s", b"a", b"b"))
    assert session.route(a, s) is handler
    assert session.route(a, 0) is other
    assert session.route(a, 999) is other
    assert session.route(b, 0) is None
    assert session.route(50, s) is handler
    assert session.route(wire.numbers[b"silent"], 0) is None


def test_a_refused_subtopic_ends_that_subscription_only():
    session, answers = new_session(), []
    wire = Wire(session, denied=(b"bad",))
    session.subscribe(b"a", b"bad", handler, lambda *numbers: answers.append(numbers))
    wire.answer()
    assert answers == [(0, 0)]
    assert wire.kinds(Type.UNSUBSCRIBE) == [number(wire.numbers[b"a"])]
    session.subscribe(b"b", None, handler, ignore)
    session.subscribe(b"b", b"bad", other, ignore)
    wire.answer()
    assert session.route(wire.numbers[b"b"], 5) is handler
    assert len(wire.kinds(Type.UNSUBSCRIBE)) == 1


def test_self_with_a_new_subtopic_waits_for_its_number():
    session, answers = new_session(), []
    wire = Wire(session)
    session.subscribe(SELF, b"s", handler, lambda *numbers: answers.append(numbers))
    assert answers == []
    wire.answer()
    assert answers == [(50, 100)]
    session.subscribe(SELF, None, other, lambda *numbers: answers.append(numbers))
    assert answers[1:] == [(50, 0)]
    assert wire.kinds(Type.SUBSCRIBE) == []


def test_unsubscribe_before_the_answer_is_carried_out_after_it():
    session = new_session()
    wire = Wire(session)
    session.subscribe(b"a", None, handler, ignore)
    session.unsubscribe(b"a")
    assert wire.sent() == [smq.with_name(Type.SUBSCRIBE, b"a")]
    session.acked(Ack(Type.SUBACK, 9, b"a"))
    assert wire.sent() == [smq.with_id(Type.UNSUBSCRIBE, 9)]
    assert session.route(9, 0) is None


def test_the_last_handler_of_a_topic_unsubscribes():
    session = new_session()
    wire = Wire(session)
    session.subscribe(b"a", b"s", handler, ignore)
    session.subscribe(b"a", None, other, ignore)
    wire.answer()
    s, a = wire.numbers[b"s"], wire.numbers[b"a"]
    session.remove_handler(b"a", b"s")
    session.remove_handler(b"a", b"unknown")
    assert wire.sent() == []
    assert session.route(a, s) is other
    session.remove_handler(b"a", None)
    assert wire.sent() == [smq.with_id(Type.UNSUBSCRIBE, a)]
    assert session.route(a, 0) is None


def test_unsubscribe_of_self_sends_nothing():
    session = new_session()
    wire = Wire(session)
    session.subscribe(SELF, None, handler, ignore)
    session.unsubscribe(SELF)
    assert wire.sent() == []
    assert session.route(50, 0) is None


def test_commands_before_the_connection_run_with_it():
    session, order = new_session(), []
    session.subscribe(SELF, None, handler, lambda tid, stid: order.append(("self", tid)))
    session.subscribe(b"a", None, handler, lambda tid, stid: order.append(("a", tid)))
    session.publish(b"early", b"a", b"s")
    session.observe(b"a", ignore)
    session.observe(777, ignore)
    wire = Wire(session).answer()
    assert order == [("self", 50), ("a", 100)]
    assert wire.published() == [(100, 50, 101, b"early")]
    assert wire.kinds(Type.OBSERVE) == [number(777), number(100)]


def test_a_reconnect_requests_everything_again_with_new_numbers():
    session, acks, counts = new_session(), [], []
    wire = Wire(session)
    session.create(b"created", acks.append)
    session.subscribe(b"a", b"s", handler, lambda *numbers: acks.append(numbers))
    session.observe(b"created", counts.append)
    wire.answer()
    session.lost()
    assert (session.etid, session.topics.number(b"a"), session.route(wire.numbers[b"a"], 0)) == (0, None, None)
    again = Wire(session, etid=51, base=900)
    assert again.restored == []
    again.answer()
    assert again.restored == [True]
    assert len(acks) == 2
    assert again.kinds(Type.CREATE) == [b"created"]
    assert again.kinds(Type.CREATESUB) == [b"s"]
    assert again.kinds(Type.SUBSCRIBE) == [b"a"]
    assert again.kinds(Type.OBSERVE) == [number(again.numbers[b"created"])]
    assert session.route(again.numbers[b"a"], again.numbers[b"s"]) is handler


def test_a_repeated_request_is_answered_once():
    session, acks = new_session(), []
    Wire(session)
    session.create(b"a", acks.append)
    session.publish(b"1", b"a", None)
    session.lost()
    second = Wire(session)
    session.lost()
    assert second.restored == [True]
    wire = Wire(session, base=300).answer()
    assert acks == [300]
    assert wire.published() == [(300, 50, 0, b"1")]


def test_an_interrupted_reconnect_loses_nothing():
    session = new_session()
    wire = Wire(session)
    session.subscribe(b"a", b"s", handler, ignore)
    session.create(b"b", ignore)
    wire.answer()
    session.lost()
    second = Wire(session, base=200)
    session.acked(Ack(Type.CREATEACK, 200, b"b"))
    assert second.restored == []
    session.lost()
    third = Wire(session, base=300).answer()
    assert third.restored == [True]
    assert session.route(third.numbers[b"a"], third.numbers[b"s"]) is handler
    assert third.kinds(Type.CREATE) == [b"b"]


def test_a_clean_start_forgets_everything():
    session = new_session(clean_start=True)
    Wire(session, denied=()).answer()
    session.subscribe(b"a", None, handler, ignore)
    session.observe(5, ignore)
    session.publish(b"held", b"x", None)
    session.lost()
    again = Wire(session)
    assert (again.restored, again.sent(), session.dropped) == ([True], [], 1)


def test_observing_an_etid_ends_with_it():
    session, counts = new_session(), []
    wire = Wire(session)
    session.observe(777, counts.append)
    assert wire.sent() == [smq.with_id(Type.OBSERVE, 777)]
    session.changed(Change(777, 0))(0)
    assert session.changed(Change(777, 0)) is None
    assert counts == [0]


def test_observing_oneself_is_let_be():
    session = new_session()
    wire = Wire(session)
    session.observe(SELF, ignore)
    session.observe(50, ignore)
    session.unobserve(50)
    assert wire.sent() == []


def test_observing_a_name_creates_the_topic_with_zero():
    session, counts = new_session(), []
    wire = Wire(session)
    session.observe(b"room", counts.append)
    wire.answer()
    assert wire.log == [smq.with_name(Type.CREATE, b"room"), smq.with_id(Type.OBSERVE, 100)]
    for count in (1, 0, 2):
        session.changed(Change(100, count))(count)
    assert counts == [1, 0, 2]
    session.unobserve(b"room")
    assert wire.sent() == [smq.with_id(Type.UNOBSERVE, 100)]
    assert session.changed(Change(100, 3)) is None


def test_a_full_queue_drops_and_counts():
    session = new_session(queue_bytes=100)
    wire = Wire(session)
    assert session.publish(bytes(60), 5, None)
    assert not session.publish(bytes(60), 5, None)
    assert session.dropped == 1
    wire.sent()
    assert session.publish(bytes(60), 5, None)
    session.lost()
    assert session.dropped == 2


def test_held_messages_count_against_the_queue():
    session = new_session(queue_bytes=100)
    assert session.publish(bytes(60), b"a", None)
    assert not session.publish(bytes(60), b"a", None)
    assert session.waiting_bytes == 75


def test_drained_waits_for_numbers_and_for_a_connection():
    session, drained = new_session(), []
    session.when_drained(lambda: drained.append(1))
    assert drained == []
    wire = Wire(session)
    assert drained == [1]
    session.publish(b"x", b"a", None)
    session.when_drained(lambda: drained.append(2))
    session.create(b"b", ignore)
    assert drained == [1]
    wire.answer()
    assert drained == [1, 2]


def test_an_unrequested_answer_is_ignored():
    session = new_session()
    wire = Wire(session)
    for number_ in range(1000):
        session.acked(Ack(Type.CREATEACK, 1 + number_, b"%d" % number_))
        session.acked(Ack(Type.SUBACK, 1 + number_, b"%d" % number_))
        session.acked(Ack(Type.CREATESUBACK, 1 + number_, b"%d" % number_))
    assert session.topics.number(b"5") is None
    assert session.subtopics.number(b"5") is None
    assert wire.sent() == []


def seconds_of(job):
    begin_s = time.process_time()
    job()
    return time.process_time() - begin_s


def test_answers_in_any_order_cost_the_same():
    session, count = new_session(), 20_000
    Wire(session)
    names = [b"%d" % n for n in range(count)]
    for name in names:
        session.create(name, ignore)
    answers = [Ack(Type.CREATEACK, 1 + n, name) for n, name in enumerate(reversed(names))]
    assert seconds_of(lambda: [session.acked(answer) for answer in answers]) < 1
    assert session.topics.number(b"0") == count


def test_refusals_cost_the_same_however_much_is_held():
    session, count = new_session(queue_bytes=1 << 22), 20_000
    wire = Wire(session)
    names = [b"%d" % n for n in range(count)]
    for name in names:
        session.publish(b"", name, None)
    wire.sent()
    refusals = [Ack(Type.CREATEACK, 0, name) for name in names]
    assert seconds_of(lambda: [session.acked(refusal) for refusal in refusals]) < 1
    assert (session.dropped, session.waiting_bytes) == (count, 0)


def test_subtopics_of_a_topic_cost_linear_time():
    session, count = new_session(), 10_000
    wire = Wire(session)
    for n in range(count):
        session.subscribe(b"t", b"%d" % n, handler, ignore)
    assert seconds_of(wire.answer) < 2
    tid = session.topics.number(b"t")
    assert all(session.route(tid, session.subtopics.number(b"%d" % n)) is handler for n in range(0, count, 999))


def test_empty_messages_fill_the_queue_too():
    session = new_session(queue_bytes=150)
    assert [session.publish(b"", b"a", None) for _ in range(11)] == [True] * 10 + [False]


def test_a_refused_name_can_be_requested_again():
    session = new_session()
    wire = Wire(session)
    session.publish(b"1", b"slow", None)
    session.publish(b"2", b"a", None)
    session.acked(Ack(Type.CREATEACK, 0, b"a"))
    session.publish(b"3", b"a", None)
    session.acked(Ack(Type.CREATEACK, 5, b"slow"))
    session.acked(Ack(Type.CREATEACK, 6, b"a"))
    wire.sent()
    assert [payload for *_, payload in wire.published()] == [b"1", b"2", b"3"]
