"""The client of warm_python.py: `python -S -E -s warm_python_client.py ADDRESS PYTHON WORDS...`."""

import json
import os
import signal
import socket
import sys

address, python, *words = sys.argv[1:]
if not words or (words[0].startswith("-") and words[0] not in ("-u", "-m")):
    os.execv(python, [python, *words])
server = socket.socket(socket.AF_UNIX)
server.connect(f"\0{address}")
request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
message = json.dumps(request).encode() + b"\n"
sent = socket.send_fds(server, [message], [0, 1, 2])
server.sendall(message[sent:])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, lambda got, frame: server.sendall(bytes([got])))
code = int(server.recv(16))
if code < 0:  # ended by a signal, which ends this process, too
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
