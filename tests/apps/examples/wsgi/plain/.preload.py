"""WSGI by hand: what fails, and what is not callable."""

from smqrt.app import ArgumentError, Directory, dir

try:
    dir.mount("shop")
except ArgumentError as error:
    refused = str(error)


def fails(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    raise ValueError("nobody catches it")


def tells(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [environ["SCRIPT_NAME"].encode(), b" ", environ["PATH_INFO"].encode(), b" ", refused.encode()]


deep = Directory("deep")
dir.insert(deep)
dir.mount(fails, "fails")
dir.mount(tells, "tells")
