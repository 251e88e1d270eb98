// The same chat by gRPC from Node, which reads the protos as they are.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const address = process.argv[2] ?? "127.0.0.1:50051";
const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const definition = loader.loadSync("specdecode/v1/router_service.proto", {
  includeDirs: [protos, `${protos}/third_party`],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
});
const { RouterService } = grpc.loadPackageDefinition(definition).specdecode.v1;
const client = new RouterService(address, grpc.credentials.createInsecure());

const call = client.Generate(
  {
    chat: { messages: [{ role: "user", content: "Why is the sky blue?" }] },
    sampling: { max_tokens: 64, temperature: 0.7, seed: 7 },
  },
  { deadline: Date.now() + 120_000 },
);
for await (const piece of call) {
  process.stdout.write(piece.text);
  if (piece.usage) {
    const { num_emitted, num_rounds, num_accepted } = piece.usage;
    console.log(`\n${num_emitted} tokens in ${num_rounds} rounds; ${num_accepted} were drafted`);
  }
}
client.close();
