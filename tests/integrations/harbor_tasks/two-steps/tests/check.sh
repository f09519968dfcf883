# the same for both steps: the file $1 has the text $2
[ "$(cat "/app/$1")" = "$2" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
