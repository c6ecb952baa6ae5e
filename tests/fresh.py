"""Python processes that know nothing of the test's own, without importing torch again for each.

One process a worker imports torch and hcx and nothing else; every script runs in a fork of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_SERVER = """
import json, os, sys, traceback
import torch
import hcx.rewrite
from hcx.rewrite import load, Plan, trace

torch.set_num_threads(1)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{request['folder']}/{name}", os.O_WRONLY | os.O_CREAT), number)
            sys.argv = ["-c", *request["arguments"]]
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
    """Like ``subprocess.run([sys.executable, "-c", code, ...], capture_output=True, text=True)``."""
    _, option, code, *arguments = command
    assert option == "-c"
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        server.stdin.write(json.dumps({"code": code, "arguments": arguments, "folder": folder}) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status, "the process that the scripts are forked from has ended"
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(command, int(status), out, err)
