"""Sessions and logins: forms, users in a table and behind a function, WSGI applications that are mounted."""

from pathlib import Path

import gevent

from smqrt.app import Account, Acl, Authenticator, Directory, FunctionAuthorizer, UserTable, app, dir
from smqrt.process.current_process import application_folder

users = UserTable({"ann": {"pwd": "secret", "roles": ["admin"]}, "bob": "hunter2"})
acl = Acl(users, {"all": {"urls": ["/*"], "roles": ["admin"]}})
asked = []


def page(request, info):
    asked.append(info.username)
    where = application_folder() == Path(app.io.realpath(""))
    request.response.write(f"login {info.realm} {info.username} {info.loginattempts} {where}")


def me(request):
    user, session = request.user(), request.session()
    name = user and [user.name, user.kind]
    return {"user": name, "visits": session and session.get("visits"), "relogin": request.logins.users()}


def outside(request, relpath):
    response = request.response
    if relpath == "me":
        response.json(me(request))
    elif relpath == "visit":
        session = request.session(create=True)
        session["visits"] = session.get("visits", 0) + 1
        response.json([session["visits"], "visits" in session, session.pop("none", 7), session.setdefault("a", 1)])
    elif relpath == "late":
        response.write("x")
        response.flush()
        try:
            request.session(create=True)
        except RuntimeError as error:
            response.write(str(error))
    elif relpath == "in":
        response.json(request.login(request.query.get("name")))
    elif relpath == "lock":
        dir.setauth(Authenticator({"ann": "secret"}, "form", page=page))
    elif relpath == "unlock":
        dir.setauth()
    elif relpath == "out":
        response.json(request.logout("all" in request.query))
    else:
        return False
    return True


dir.setfunc(outside)


def found(name, password, request):
    gevent.sleep(0.01)  # as a database somewhere else would
    if name == "broken":
        raise ValueError("no database")
    return Account(password="blocks") if name == "slow" else None


def tells(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    body = environ["wsgi.input"].read()
    return [environ.get("REMOTE_USER", "-").encode(), b" ", environ.get("AUTH_TYPE", "-").encode(), b" ", body]


form = Directory("form")
form.setfunc(lambda request, relpath: False)
below = Directory()
below.setfunc(lambda request, relpath: request.response.write(f"hello {request.user().name} at {relpath}"))
form.insert(below)
form.setauth(Authenticator(users, "form", realm="The vault", page=page), acl)
dir.insert(form)

mounted = dir.mount(tells, "wsgi")
mounted.setauth(Authenticator(found, "basic", page=page))
posted = dir.mount(tells, "posted")
posted.setauth(Authenticator({"ann": "secret"}, "form", page=page))
chosen = dir.mount(tells, "chosen")
chosen.setauth(
    Authenticator({"ann": "secret"}, "basic"),
    FunctionAuthorizer(lambda name, method, path, session: (name, method, path) == ("ann", "GET", "yes")),
)
