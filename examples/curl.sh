#!/usr/bin/env bash
# The same chat by curl: one event a piece, then what speculation did for it.
set -euo pipefail
url=${1:-http://127.0.0.1:8080}

curl --silent --show-error --fail-with-body --no-buffer "$url/v1/chat/completions" \
    --header 'content-type: application/json' \
    --data '{
      "messages": [{"role": "user", "content": "Why is the sky blue?"}],
      "max_tokens": 64, "temperature": 0.7, "seed": 7, "stream": true,
      "speculative_decoding": {"mode": "auto"}
    }'
