"""Launcher of a command on a pseudo terminal.

The script makes its standard input the controlling terminal, then replaces itself by the command. It does not import
the package: `python -I -S pty_launcher.py COMMAND ARGV0 ARGV1 ...`.
"""

import _signal as signal  # type: ignore[import-not-found]  # without the enums, which take 5 ms to import
import errno
import fcntl
import os
import resource
import sys
import termios

_FILES = 1024  # the usual soft limit; the server has raised its own

_, command, *arguments = sys.argv
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)  # Python ignores them
os.closerange(3, 1 << 20)  # files opened by Lua's own `io` are inheritable
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard), hard))
try:
    os.execvp(command, arguments)
except OSError as error:
    os.write(2, f"{command}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
    os._exit(127 if error.errno == errno.ENOENT else 126)  # the exit statuses of shells
