#!/bin/bash
cat /root/secret 2> /dev/null || echo "$(id -un) $GREETING" > who
