"""Sessions and logins of two workers, here in one process: what each knows of the other (help: workers)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from hashlib import sha1
from pathlib import Path
from time import monotonic, thread_time

import gevent
import pytest

from smqrt.auth.identity import Identity, Method
from smqrt.http import shared_sessions
from smqrt.http.logins import Login, Logins
from smqrt.http.shared_sessions import SharedSessions, sessions_of
from smqrt.workers.worker_rpc import WorkerPlace
from tests.apps.lua.app_server import Answer, AppServer
from tests.apps.lua.logins import APPLICATION, basic, cookie, digest_of, sign_in
from tests.support.digest import authorization
from tests.support.factory import Factory
from tests.support.waiting import wait_until

SECRET = b"s" * 32
TICK_S, SLACK_S = 0.1, 0.2
Make = Callable[..., AppServer]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done once a second is done more often."""
    for name, value in {"TICK_S": TICK_S, "SLACK_S": SLACK_S, "LOCK_S": 5 * TICK_S}.items():
        monkeypatch.setattr(shared_sessions, name, value)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A factory of workers, which share a folder: `make()`."""
    count = 0

    def worker(per_address: int = 1000, most: int = 10_000) -> AppServer:
        nonlocal count
        place = WorkerPlace(count, 2, SECRET, tmp_path, start=count)
        count += 1
        sessions = sessions_of(place, per_address, most)
        folder = tmp_path / f"w{count}"
        folder.mkdir()
        return AppServer(folder, Logins(sessions, SECRET))

    def end(server: AppServer) -> None:
        server.services.logins.sessions.close()
        server.close()

    with Factory(worker, end) as made:
        yield made


@pytest.fixture
def pair(make: Make) -> tuple[AppServer, AppServer]:
    """Two workers."""
    return make(), make()


@pytest.fixture
def logins(pair: tuple[AppServer, AppServer]) -> tuple[AppServer, AppServer]:
    """Two workers with a folder for each type of authenticator."""
    for server in pair:
        assert server.applications.load("", APPLICATION).error is None
    return pair


def sessions(server: AppServer) -> SharedSessions:
    found = server.services.logins.sessions
    assert isinstance(found, SharedSessions)
    return found


def begin(server: AppServer) -> dict[str, str]:
    """The cookie of a new session."""
    return cookie(server.page("<?lsp request:session(true) ?>"))


def test_a_session_is_the_same_everywhere(pair: tuple[AppServer, AppServer]):
    first, second = pair
    mine = begin(first)
    page = "<?lsp local s = request:session() print(s and s:id(), s and s:id(true), s and s:usecounter()) ?>"
    number, text, uses = second.page(page, headers=mine).text.split()
    assert (text, uses) == (mine["Cookie"].partition("=")[2], "1")
    assert first.page(page, headers=mine).text.split()[:2] == [number, text]
    assert second.page(f"<?lsp print(ba.session({number}):id(true), #ba.sessions()) ?>").text.split() == [text, "1"]
    assert cookie(second.page("<?lsp request:session(true) ?>")) != mine
    assert first.page("<?lsp print(#ba.sessions()) ?>").text == "2\n"
    second.page("<?lsp request:session():terminate() ?>", headers=mine)
    assert first.page(page, headers=mine).text == "false\tfalse\tfalse\n"
    assert first.page(f"<?lsp print(ba.session({number}), #ba.sessions()) ?>").text == "nil\t1\n"


def test_attributes_are_the_same_everywhere(pair: tuple[AppServer, AppServer]):
    first, second = pair
    mine = begin(first)

    def do(server: AppServer, text: str) -> str:
        return server.page(f"<?lsp local s = request:session() {text} ?>", headers=mine).text.strip()

    do(first, "s.n, s.f, s.b, s.t, s[7], s.cart = 1, 1.5, false, 'x\\0y', 'seven', {1, {name='apple'}}")
    show = "print(s.n, s.f, s.b, #s.t, s[7], s.cart and #s.cart, s.cart and s.cart[2].name)"
    assert do(second, show) == "1\t1.5\tfalse\t3\tseven\t2\tapple"
    assert do(second, "print(math.type(s.n), math.type(s.f), s:attributes().n)") == "integer\tfloat\t1"

    # In place, in a page that ends; and the table of somebody who has it is still that one.
    do(first, "app.kept = s.cart")
    do(second, "s.cart[2].name = 'pear' s.cart[3] = 3")
    assert do(first, "print(s.cart[2].name, #s.cart, app.kept == s.cart)") == "pear\t3\tfalse"
    do(second, "s:attributes().cart[4] = 4")
    assert do(first, "print(s.cart[4])") == "4"
    do(second, "s.n = nil")
    assert do(first, "app.kept = s.cart print(s.n, s:attributes().n, app.kept == s.cart)") == "nil\tnil\ttrue"

    # In place, in an activity that is not a page.
    do(first, "ba.thread.run(function() ba.sleep(100) s.cart[3] = 'later' end)")
    wait_until(lambda: do(second, "print(s.cart[3])") == "later")

    # What can't cross stays where it was set, and takes the place of what was there.
    do(first, "s.f = print s.self = s s.cart = setmetatable({}, {})")
    assert do(first, "print(type(s.f), s.self == s, type(s.cart))") == "function\ttrue\ttable"
    assert do(second, "print(s.f, s.self, s.cart)") == "nil\tnil\tnil"
    do(second, "s.f = 3")
    assert do(first, "print(s.f, s.self == s)") == "3\ttrue"
    do(first, "s.f = ('x'):rep(300 << 10)")
    assert (do(first, "print(#s.f)"), do(second, "print(s.f)")) == ("307200", "nil")


def test_nothing_is_written_when_nothing_changes(pair: tuple[AppServer, AppServer]):
    first, second = pair
    mine = begin(first)
    source = "<?lsp local s = request:session() s.a = s.a or {x = 1, y = 2, z = {3}} s.b = 'b' print(s.a.z[1]) ?>"
    for server in (first, second, first, second):
        server.page(source, headers=mine)
    sessions(first).catch_up()
    session = sessions(first).find(mine["Cookie"].partition("=")[2])
    changes = session.changes  # type: ignore[union-attr]
    for server in (first, second) * 5:
        assert server.page(source, headers=mine).text == "3\n"
    sessions(first).catch_up()
    assert session.changes == changes  # type: ignore[union-attr]


def test_attributes_of_python(pair: tuple[AppServer, AppServer]):
    first, second = (sessions(one) for one in pair)
    session = first.create("10.0.0.1")
    session["a"], session["b"], session["odd"] = [1, (2, b"3")], "b", object()
    first.save(session)
    other = second.find(session.id)
    assert other is not None
    assert other.attributes == {"a": [1, (2, b"3")], "b": "b"}
    other["a"].append({"x": None})
    del other["b"]
    second.save(other)
    first.catch_up()
    assert session["a"] == [1, (2, b"3"), {"x": None}]
    assert set(session.attributes) == {"a", "odd"}
    other["by itself"] = 1.5  # outside of a request
    wait_until(lambda: session.get("by itself") == 1.5)
    other["a"].clear()
    wait_until(lambda: session["a"] == [])


def test_forms_and_seeds(logins: tuple[AppServer, AppServer]):
    first, second = logins
    assert sign_in(first, "/form/who.lsp", username="ann", password="wrong").text == "form ann secret 1 false"
    assert sign_in(second, "/form/who.lsp", username="ann", password="wrong").text == "form ann secret 2 false"
    right = sign_in(first, "/form/who.lsp", username="ann", password="secret")
    mine = cookie(right)
    assert second.ask("/form/who.lsp", headers=mine).text.startswith("ann\tsecret\tform\n" * 2)
    assert second.ask("/form/who.lsp", headers=mine, source="127.0.0.2").text == "form nil nil 0 false", "bound to it"
    assert second.services.logins.users() == ["ann"]
    assert second.ask("/form/login.lsp?do=logout", headers=mine).text.startswith("true\nnil\n")
    assert first.ask("/form/who.lsp", headers=mine).text == "form nil nil 0 false"
    ask = {"X-Requested-With": "XMLHttpRequest"}
    info = json.loads(first.ask("/sform/", headers=ask).body)
    hashed = sha1(("secret" + info["seed"]).encode()).hexdigest()
    fields = {"username": "ann", "password": hashed, "seed": info["seed"], "seedkey": info["seedkey"]}
    assert sign_in(second, "/sform/", **fields).status == 302
    assert sign_in(first, "/sform/", **fields).status == 200, "a seed is good once, for all"


def test_digest_counts_over_all(logins: tuple[AppServer, AppServer]):
    first, second = logins
    challenge = digest_of(first, "/auth/x")["SHA-256"]

    def ask(server: AppServer, count: int) -> Answer:
        words = authorization(challenge, "ann", "secret", "/auth/who.lsp", count=count)
        return server.ask("/auth/who.lsp", headers={"Authorization": words})

    assert ask(second, 1).status == 200
    replayed = ask(first, 1)
    assert (replayed.status, "stale=true" in replayed.headers["WWW-Authenticate"]) == (401, True)
    assert [ask(first, 3).status, ask(second, 2).status, ask(first, 2).status] == [200, 200, 401]
    assert len(sessions(first)) == 1, "without a cookie it is one login"


def test_limits_count_over_all(make: Make):
    first, second = make(per_address=3), make(per_address=3)
    cookies = [begin(server) for server in (first, second, first)]
    first.page("<?lsp request:session() ?>", headers=cookies[0])  # the one of `second` is used least recently
    gevent.sleep(TICK_S + 0.2)
    cookies.append(begin(second))
    page = "<?lsp print(request:session() and true) ?>"
    assert [first.page(page, headers=one).text.strip() for one in cookies] == ["true", "false", "true", "true"]
    login = "<?lsp print(request:login('eve', 2, {}), request:user()) ?>"
    seen = [one.page(login.format("false")).text.split()[0] for one in (first, second, first)]
    assert seen == ["true", "true", "false"]
    assert second.page("<?lsp print(#ba.sessions('eve'), ba.users()[1]) ?>").text == "2\teve\n"
    assert second.page(login.format("true")).text.split() == ["true", "eve", "nil", "?"]
    assert first.page("<?lsp print(#ba.sessions('eve')) ?>").text == "2\n"


def test_a_login_changes_the_session_id_everywhere(pair: tuple[AppServer, AppServer]):
    first, second = pair
    old = begin(first)
    second.page("<?lsp request:session().kept = 1 ?>", headers=old)
    new = cookie(first.page("<?lsp request:login('eve') ?>", headers=old))
    show = "<?lsp local s = request:session() print((request:user()), s and s.kept) ?>"
    assert second.page(show, headers=old).text.split() == ["nil", "false"]
    assert second.page(show, headers=new).text.split() == ["eve", "1"]


def test_a_new_worker_has_all_sessions(make: Make):
    first = make()
    mine = cookie(first.page("<?lsp request:login('eve') request:session().a = {1} ?>"))
    for _ in range(1100):  # more than one helping
        sessions(first).create("10.0.0.1")
    second = make()
    sessions(second).catch_up()
    assert len(sessions(second)) == len(sessions(first))
    first.services.logins.sessions.close()  # and it is gone
    assert second.page("<?lsp print((request:user()), request:session().a[1]) ?>", headers=mine).text == "eve\t1\n"


def test_unused_sessions_end_where_they_are_not_used(pair: tuple[AppServer, AppServer]):
    first, second = pair
    ended = []
    sessions(second).ended.append(lambda session: ended.append(session.number))
    used, unused, held = (sessions(first).create("10.0.0.1") for _ in range(3))
    for session in (used, unused, held):
        session.max_inactive_s = 0.5
        sessions(first).save(session)
    sessions(first).change_locks(held, 1)
    until_s = monotonic() + 0.5 + SLACK_S + 2 * TICK_S
    while monotonic() < until_s:
        assert sessions(first).find(used.id) is used
        gevent.sleep(0.02)
    alive = [sessions(second).find(session.id) is not None for session in (used, unused, held)]
    assert (alive, ended) == ([True, False, True], [unused.number])
    assert sessions(first).find(unused.id) is None
    assert sessions(second).find(used.id).uses > 10  # type: ignore[union-attr]


def test_onterminate_runs_where_it_was_set(pair: tuple[AppServer, AppServer]):
    first, second = pair
    mine = cookie(first.page("<?lsp request:session(true).onterminate = function() app.over = true end ?>"))
    second.page("<?lsp request:session():terminate() ?>", headers=mine)
    sessions(first).catch_up()
    wait_until(lambda: first.page("<?lsp print(app.over) ?>").text == "true\n")


def test_a_basic_login_is_one_session(logins: tuple[AppServer, AppServer]):
    for server in logins * 3:
        assert server.ask("/auth/who.lsp", headers=basic("ann", "secret")).status == 200
    assert sessions(logins[0]).numbers() == sessions(logins[1]).numbers()
    assert len(sessions(logins[0])) == 1


def test_the_file_reveals_nothing(logins: tuple[AppServer, AppServer], tmp_path: Path):
    mine = cookie(sign_in(logins[0], "/form/who.lsp", username="ann", password="secret"))
    written = b"".join(one.read_bytes() for one in tmp_path.glob("shared-*"))
    assert len(written) > 4096
    assert mine["Cookie"].partition("=")[2].encode() not in written
    assert b"secret" not in written
    assert os.stat(tmp_path).st_uid == os.getuid()


def test_the_logged_in_user_is_the_same(pair: tuple[AppServer, AppServer]):
    first, second = pair
    session = sessions(first).create("10.0.0.1")
    identity = Identity("ann", ("staff", "admins"), Method.PASSWORD, expires_s=2e9, proof="$argon2id$")
    login = Login("ann", "g\udcffheim", "form", "10.0.0.1", session, identity=identity)
    first.services.logins._add(login)
    sessions(first).save_login(session)
    other = sessions(second).find(session.id)
    assert other is not None
    assert other.login.session is other
    assert other.login.record() == login.record()
    assert isinstance(other.login.identity.groups, tuple)
    assert other.login.identity.method is Method.PASSWORD
    second.services.logins.recheck_clients(lambda who: None if who.expires_s == 2e9 else "gone")
    assert second.services.logins.users() == ["ann"]
    second.services.logins.recheck_clients(lambda who: "gone")
    assert sessions(first).find(session.id) is None


def test_two_change_the_same_table(pair: tuple[AppServer, AppServer]):
    """The last who writes it wins, and both see the same then."""
    first, second = pair
    mine = begin(first)
    first.page("<?lsp request:session().t = {n = 0} ?>", headers=mine)
    slow = """<?lsp
      local t = request:session().t
      t.n = 1
      ba.sleep(200)
      print(request:session().t.n)
    ?>"""
    sessions(first)._ticker.stop()  # which would write it earlier
    asked = gevent.spawn(first.page, slow, headers=mine)
    gevent.sleep(0.1)
    second.page("<?lsp request:session().t.n = 2 ?>", headers=mine)
    assert asked.get().text == "1\n"
    show = "<?lsp print(request:session().t.n) ?>"
    assert [one.page(show, headers=mine).text for one in pair] == ["1\n"] * 2


def test_a_flood_delays_no_others(pair: tuple[AppServer, AppServer]):
    first, second = (sessions(one) for one in pair)
    second.catch_up()
    made = [first.create(f"10.0.{at >> 8}.{at & 255}") for at in range(3000)]
    began_s = thread_time()
    assert second.find(made[-1].id) is not None
    assert thread_time() - began_s < 0.2, "some 10 µs each"
    assert len(second) == 3000
    for session in made[:2000]:
        first.terminate(session)
    assert second.find(made[0].id) is None
    assert second.numbers() == first.numbers()
