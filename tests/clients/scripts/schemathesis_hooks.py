"""Loaded by schemathesis: a server that was paused is resumed at once, or all that comes later would wait."""

import os
import urllib.request

import schemathesis


@schemathesis.hook
def after_call(context, case, response):
    if case.operation.path == "/pause":
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        request = urllib.request.Request(os.environ["VF_BASE"] + "/resume", method="POST", headers=headers)
        urllib.request.urlopen(request, timeout=10).read()
