#!/usr/bin/env bash
# The same chat by grpcurl, which asks the router itself what its messages look like.
set -euo pipefail
address=${1:-127.0.0.1:50051}

grpcurl -plaintext -d '{
  "chat": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
  "sampling": {"max_tokens": 64, "temperature": 0.7, "seed": 7}
}' "$address" specdecode.v1.RouterService/Generate
