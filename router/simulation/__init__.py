"""A fleet by discrete events: the router's own policy on replicas and drafters that are only costs and odds.

    workload (requests at times) → fleet (placement, events) → replica (steps, leases, drafts) → figures

What is real: `router.policy.decide`, estimates, histories, probes, leases. What is modelled: a step takes
what its costs say, a draft is accepted as the request's own α says, orders travel in no time, each replica
has a drafter of its own, prefix caches are empty, KV blocks are never short (`max_running` is the bound).
Rates go to the last token, so that stragglers count.

What it takes, on one core of a Xeon: 4,000 requests at 2,000 a second on 200 replicas (400,000 tokens, 4.4
simulated seconds) took 9 s off, 17 s with γ = 3 and 44 s with auto, 0.1 ms a token, and 300 MB. So minutes of
a fleet of hundreds take tens of minutes; a slice of it at the same load a replica says much the same sooner.
"""
