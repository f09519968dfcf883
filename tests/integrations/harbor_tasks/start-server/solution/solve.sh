#!/bin/bash
# the greeting is there; a session of its own outlives the terminal that some runners give this script
setsid python3 -m http.server 8000 --directory site > server.log 2>&1 &
sleep 1
