#!/bin/bash
id
grep -q closed /root/secret && [ "$(cat /app/who)" = "$EXPECTED hello" ] && [ "$(stat -c %U /app/who)" = worker ] \
  && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
