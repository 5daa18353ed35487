"""Every kind of request and answer that an application in Python knows."""

import json

import gevent
import models.item
import store
from models import tag

from smqrt.app import Directory, HttpError, WebSocket, WebSocketClosedError, app, dir, io

assert app["dir"] is dir
assert app.io is io
later = gevent.spawn(lambda: store.lazily()).get()


def names(request):
    query = request.query
    return {
        "method": request.method,
        "path": request.path,
        "query": query,
        "q": query.get("q"),
        "all": query.getall("q"),
        "index": "q" in query and query["q"],
        "missing": query.get("missing", "none"),
        "names": list(query.keys()),
        "cookie": request.cookies.get("a"),
        "cookies": request.cookies.pairs,
    }


def form(request):
    fields = request.form()
    files = [[one.name, one.filename, one.content_type, one.read().decode()] for one in request.files()]
    return {"fields": fields.pairs, "files": files, "again": request.form() == fields}


def streamed(request):
    seen = []
    for upload in request.files(limit_bytes=200_000):
        if upload.filename == "skip":
            continue
        size = upload.save("saved-" + upload.name, limit_bytes=100_000)
        seen.append([upload.filename, size, sorted(request.form())])
    return {"seen": seen, "fields": request.form().pairs}


def twice(request):
    said = []
    for _ in range(2):
        try:
            request.form()
        except HttpError as error:
            said.append(error.status)
    files = request.files()
    return [said, len(list(files)), len(list(request.files())), request.form().pairs]


def caught(request):
    try:
        return {"value": request.json()}
    except HttpError as error:
        return {"status": error.status, "detail": error.detail}


ANSWERS = {
    "names": names,
    "json": lambda request: {"value": request.json(), "again": request.json(), "bytes": len(request.body())},
    "caught": caught,
    "missing": lambda request: [request.form().get("a"), "b" in request.form(), request.form()["a"], request.form()],
    "twice": twice,
    "said": lambda request: app.said,
    "form": form,
    "files": streamed,
    "modules": lambda request: [later, store.name, models.item.NAME, tag.NAME, store.count(), store.__name__],
}


def generated():
    try:
        yield "first,"
        yield b"second"
        gevent.sleep(0)
        yield ",third"
    finally:
        app.closed += 1


closed = 0


def late(call):
    try:
        return str(call())
    except Exception as error:
        return str(error)


def begin():
    return app.kept.session(create=True)


def talk(request, relpath):
    with WebSocket(request, max_message_bytes=200_000) as client:
        app.clients.append(client)
        if relpath == "ws/fails":
            raise ValueError("while a WebSocket was open")
        if relpath == "ws/bye":
            client.close(4001, "enough " + "ü" * 100)
        if relpath == "ws/waits":
            try:
                client.receive(timeout_s=0.01)
            except TimeoutError as error:
                client.send(str(error))
        for message in client:
            client.send(message[::-1])
    said.append((client.close_code, client.receive()))
    try:
        client.send("too late")
    except WebSocketClosedError as error:
        said.append(str(error))


clients, said = [], []


def answer(request, relpath):
    response = request.response
    if relpath in ANSWERS:
        response.json(ANSWERS[relpath](request))
    elif relpath == "text":
        response.write("<p>grün")
    elif relpath == "bytes":
        response.write(b"plain")
    elif relpath == "created":
        response.write("dropped")
        response.set_cookie("kept", "1")
        response.json({"done": float("nan")}, status=201)
        response.write("ignored")
    elif relpath == "cookies":
        response.set_cookie("a", "b", max_age_s=60, path="/pyapi/", samesite="Strict")
        response.delete_cookie("old")
        response.redirect("text")
    elif relpath == "stream":
        response.headers.set("Content-Type", "text/csv")
        response.stream(generated())
    elif relpath == "endless":
        app.streaming = True
        response.stream(iter(lambda: b"piece", b""))
        app.streaming = False
    elif relpath == "streaming":
        response.json(app.streaming)
    elif relpath == "kept":
        app.setdefault("kept", request).response.write("kept")
    elif relpath == "kept/late":
        response.json([late(one) for one in (app.kept.body, app.kept.form, app.kept.json, app.kept.chunks, begin)])
    elif relpath == "closed":
        response.json(closed)
    elif relpath == "unknown":
        response.json(object())
    elif relpath == "nested":
        store.fail(json.loads(request.query["values"]))
    elif relpath == "late":
        response.write("<p>" + "x" * 9000)
        raise ValueError("in the <middle>")
    elif relpath == "download":
        response.headers.set("Content-Type", "text/csv")
        response.write("x" * 9000)
        raise ValueError("in the middle")
    elif relpath == "forgotten":
        WebSocket(request)
    elif relpath.startswith("ws/"):
        talk(request, relpath)
    elif relpath == "teapot":
        raise HttpError(418, "Short & stout.", headers={"X-Pot": "tea"})
    else:
        return False
    return True


dir.setfunc(answer)

below = Directory("below")
below.setfunc(lambda request, relpath: request.response.write(f"below {relpath} of {below.baseuri()}"))
dir.insert(below)
