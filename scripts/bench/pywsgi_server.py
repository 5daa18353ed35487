"""gevent.pywsgi serving the files of a folder from memory: pywsgi_server.py PORT FOLDER."""

import sys
from pathlib import Path

from gevent.pywsgi import WSGIServer

port, folder = int(sys.argv[1]), Path(sys.argv[2])
files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}


def application(environ, start_response):
    body = files[environ["PATH_INFO"]]
    start_response("200 OK", [("Content-Type", "text/html"), ("Content-Length", str(len(body)))])
    return [body]


WSGIServer(("127.0.0.1", port), application, log=None).serve_forever()
