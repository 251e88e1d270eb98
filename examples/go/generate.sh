#!/usr/bin/env bash
# Stubs from the protos; needs protoc, protoc-gen-go and protoc-gen-go-grpc.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

package=example.com/specdecode/v1
options=()
for proto in types router_service; do
    for plugin in go go-grpc; do
        options+=("--${plugin}_opt=Mspecdecode/v1/$proto.proto=$package")
    done
done
mkdir -p v1
protoc -I../../protos -I../../protos/third_party "${options[@]}" \
    --go_out=. --go_opt=module=example.com/specdecode \
    --go-grpc_out=. --go-grpc_opt=module=example.com/specdecode \
    specdecode/v1/types.proto specdecode/v1/router_service.proto
go mod tidy
