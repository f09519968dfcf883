#!/bin/bash
expected=$(printf "ALPHA.TXT one\nBETA.TXT two")
found=$(cd /app/outbox && for file in *; do echo "$file $(cat "$file")"; done)
[ "$found" = "$expected" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
ls -l /app/outbox
