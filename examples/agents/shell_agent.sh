#!/bin/bash
# Asks the policy to spell a word backward, with curl and jq alone, and prints its answer.
#
#     bash shell_agent.sh "Spell backward: WORD"
#
# Needs OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, which ProgramEnv sets.
set -euo pipefail

body=$(jq --null-input --arg model "$OPENAI_MODEL" --arg text "$1" \
    '{model: $model, messages: [{role: "user", content: $text}]}')
answer=$(curl --silent --show-error --fail-with-body --header "Authorization: Bearer $OPENAI_API_KEY" \
    --json "$body" "$OPENAI_BASE_URL/chat/completions" | jq --raw-output '.choices[0].message.content')
# the policy may put it into tags
answer=${answer#<answer>}
echo "${answer%</answer>}"
