"""The router's HTTP front: OpenAI's API and vLLM's extensions of it, on the core that the gRPC front has.

A request's walk: `reading` takes the body in, `bodies` is its shape, `asking` makes requests of it,
`generation` has the router run them, `shapes` says what comes of them, `responses` sends it, `errors` says
what went wrong.
"""
