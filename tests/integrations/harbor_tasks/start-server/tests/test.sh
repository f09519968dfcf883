#!/bin/bash
for try in $(seq 50); do
  python3 -c "
import urllib.request
print(urllib.request.urlopen(\"http://127.0.0.1:8000/greeting\").read().decode())" > /tmp/said 2> /tmp/why && break
  sleep 0.1
done
grep -q hello /tmp/said && echo 1 > /logs/verifier/reward.txt || { cat /tmp/why; echo 0 > /logs/verifier/reward.txt; }
