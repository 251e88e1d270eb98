"""A fleet by discrete events: the router's own policy on replicas and drafters that are only costs and odds.

    workload (requests at times) → fleet (placement, events) → replica (steps, leases, drafts) → figures

What is real: `router.policy.decide`, estimates, histories, probes, leases. What is modelled: a step takes
what its costs say, a draft is accepted as the request's own α says, orders travel in no time, each replica
has a drafter of its own, prefix caches are empty, KV blocks are never short (`max_running` is the bound).
"""
