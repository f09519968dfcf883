#!/bin/bash
# Asks the policy to spell a word backward, with curl and jq alone, and prints its answer.
#
#     bash shell_agent.sh "Spell backward: WORD"
#
# Needs OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, which ProgramEnv sets.
set -euo pipefail

# by printf, since a start of jq 1.6 takes as long as all the rest: the question has no quotes and no backslashes
body=$(printf '{"model": "%s", "messages": [{"role": "user", "content": "%s"}]}' "$OPENAI_MODEL" "$1")
answer=$(curl --silent --show-error --fail-with-body --header "Authorization: Bearer $OPENAI_API_KEY" \
    --json "$body" "$OPENAI_BASE_URL/chat/completions" | jq --raw-output '.choices[0].message.content')
# the policy may put it into tags
answer=${answer#<answer>}
echo "${answer%</answer>}"
