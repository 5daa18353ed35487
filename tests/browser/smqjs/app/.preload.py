"""A broker for the tests of smq.js; the topic "control" lets a page ask it for what a client can't do itself."""

import json

from smqrt import hub


def authenticate(credentials, info):
    return (3, "wrong password") if credentials == b"wrong" else 0


smq = hub.create(
    authenticate=authenticate,
    permittop=lambda topic, issub, peer: topic != "secret",
    permitsubtop=lambda subtopic, peer: subtopic != "secret",
)


def control(data, ptid, tid, subtid):
    command = json.loads(data)
    if "publish" in command:
        smq.publish(bytes(command["publish"]), command["topic"])
    if "disconnect" in command:
        smq.shutdown(command["disconnect"], ptid)
    if "drop" in command:
        smq.etid2peer(ptid).sock.close()


smq.subscribe("control", onmsg=control)


def serve(request, relpath):
    if relpath != "smq.lsp":
        return False
    smq.connect(request)
    return True


dir.func = serve
