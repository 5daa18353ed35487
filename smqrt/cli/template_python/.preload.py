"""Runs once, when the application starts. `answer` then handles every request, before the files of this folder."""

from smqrt import hub
from smqrt.app import dir

clicks = 0

smq = hub.create()


def on_click(data, ptid, tid, subtid):
    global clicks
    clicks += 1
    smq.publish({"clicks": clicks}, "clicks")


def on_state(state, ptid, tid, subtid):
    global clicks
    clicks = max(clicks, state["clicks"])


# With several workers, one of them counts. The others subscribe too, since any of them may replace it.
smq.subscribe("click", on_click, once=True)
smq.subscribe("clicks", on_state, json=True)


def answer(request, relpath):
    if relpath == "smq" and hub.isSMQ(request):
        smq.connect(request)  # browsers (WebSocket) and devices (raw SMQ) connect here
    elif relpath == "clicks":
        request.response.json({"clicks": clicks})
    else:
        return False  # serve the files of this folder, else 404
    return True


dir.setfunc(answer)
