#!/bin/bash
right=0
[ "$(python3 /app/median.py 3 1 2)" = 2.0 ] && right=$((right + 1))
[ "$(python3 /app/median.py 4 1 3 2)" = 2.5 ] && right=$((right + 1))
echo "$right of 2 are right"
python3 -c "print($right / 2)" > /logs/verifier/reward.txt
