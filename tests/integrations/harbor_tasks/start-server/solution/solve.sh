#!/bin/bash
# the greeting is there
python3 -m http.server 8000 --directory site > server.log 2>&1 &
