#!/bin/bash
size=$(stat -c %s /app/big)
echo "$size bytes"
[ "$size" -gt 0 ] && [ "$size" -le 67108864 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
